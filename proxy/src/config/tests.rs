use std::path::Path;
use std::time::Duration;

use baton_engines::engine_options::EngineKind;
use baton_schemas::keep_alive::KeepAlive;
use clap::Parser;

use super::schema::{SchemaPlace, Takes};
use super::*;

fn read(text: &str) -> Result<ServeConfig, String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    check_file(file.path()).map_err(|e| e.to_string())
}

fn check_file(path: &Path) -> Result<ServeConfig, ConfigError> {
    ConfigFile::read(path)?.check(Vec::new())
}

/// Every mistake in the file, each with its line.
fn mistakes(text: &str) -> Vec<String> {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    let Err(ConfigError::Mistakes(mistakes)) = check_file(file.path()) else { panic!("{text}") };
    assert!(mistakes.flags.is_empty(), "{mistakes:?}");
    mistakes.in_file
}

#[test]
fn an_empty_file_is_the_defaults() {
    let config = read("").unwrap();
    assert_eq!((config.startup.listen.as_str(), config.startup.source.as_str()), (DEFAULT_LISTEN, DEFAULT_MODEL));
    assert!(config.access.api_keys.is_empty() && !config.access.share_prefix_cache);
}

#[test]
fn json_is_told_as_such_in_one_line() {
    for text in ["{\"listen\": \"127.0.0.1:1\"}", " \n{\n  \"model\": {\"source\": \"x\"}", "{}"] {
        let found = mistakes(text);
        assert!(found.len() == 1 && found[0].contains("this is JSON"), "{text}: {found:?}");
    }
    assert!(read("a = {b = ").is_err_and(|message| !message.contains("JSON")));
}

#[test]
fn keys_expire_on_days_and_are_replaced_with_an_overlap() {
    let hash = |digit: &str| format!("blake3:{}", digit.repeat(64));
    let key = |more: &str| format!("[[keys]]\nname = \"a\"\nhash = \"{}\"\n{more}", hash("1"));
    let config = read(&key(&format!(
        "expires = 2030-01-01\nprevious_hash = \"{}\"\nprevious_expires = \"2031-01-01\"\ntokens_per_day = 5\n",
        hash("2")
    )))
    .unwrap();
    let [new, old] = &config.access.keys[..] else { panic!() };
    assert_eq!(new.expires.unwrap().to_string(), "2030-01-01");
    assert_eq!(old.expires, new.expires, "a key that expires takes its older secret with it");
    assert!(std::sync::Arc::ptr_eq(&new.account, &old.account));
    assert_eq!(new.account.limits.budgets.a_day, Some(5));
    let check = |more: &str, part: &str| {
        let message = read(&key(more)).unwrap_err();
        assert!(message.contains(part), "{more}: {message}");
    };
    check("expires = 2030-13-01", "line 4");
    for taken in ["anyone", "api_keys[0]"] {
        let message = read(&key("").replace("\"a\"", &format!("\"{taken}\""))).unwrap_err();
        assert!(message.contains("keys[0].name must not be what callers without a name are called"), "{message}");
    }
    check("expires = 2030-01-01T00:00:00Z", "keys[0].expires must be a day such as 2026-12-31");
    check("expires = \"soon\"", "keys[0].expires must be a day such as 2026-12-31");
    check("expires = 3", "keys[0].expires must be a day such as 2026-12-31 but is 3");
    check("tokens_per_day = 0", "keys[0].tokens_per_day must be");
    check("tokens_per_month = -1", "keys[0].tokens_per_month must be");
    check(&format!("previous_hash = \"{}\"", hash("2")), "keys[0].previous_expires must say");
    check("previous_expires = 2030-01-01", "keys[0].previous_expires needs the previous key");
    check(&format!("previous_hash = \"{}\"\nprevious_expires = 2030-01-01", hash("1")), "another hash of the file");
    check("previous_hash = \"the key\"\nprevious_expires = 2030-01-01", "as `hash` had it");
}

#[test]
fn mistakes_are_named_with_their_line_and_key() {
    let check = |text: &str, line: usize, key: &str| {
        let message = read(text).unwrap_err();
        assert!(message.contains(&format!("line {line}: ")) && message.contains(key), "{text}: {message}");
        assert!(!message.contains("--"), "no flag is at fault: {message}");
    };
    check("listen = \"127.0.0.1:1\"\n\nlisten_on = 3\n", 3, "listen_on");
    check("listen = \"8080\"", 1, "listen");
    check("# é\nlisten = \"h:99999\"", 2, "listen");
    check("ollama_listen = \"11434\"", 1, "ollama_listen");
    check("listen = \"127.0.0.1:1\"\nollama_listen = \"127.0.0.1:1\"", 2, "ollama_listen must not be the same");
    assert!(read("listen = \"127.0.0.1:0\"\nollama_listen = \"127.0.0.1:0\"").is_ok(), "of port 0 there are two");
    check("\nmax_requests = 0", 2, "max_requests");
    check("\n\napi_keys = [\"\"]", 3, "api_keys");
    check("allowed_origins = [\"chat.example.com\"]", 1, "chat.example.com");
    check("allowed_hosts = [\n\"https://x\"]", 1, "allowed_hosts");
    check("[model]\nsource = \"\"", 2, "model.source");
    check("[model]\nsource = 3", 2, "model.source must be a string but is 3");
    check("calibrate = 1\n[loading]\nmemory_budget = -4", 3, "loading.memory_budget must be a number of bytes");
    check("[model]\n\nsauce = \"x\"", 3, "sauce");
    check("[model]\nname = \" \"", 2, "model.name");
    check("[model]\naliases = [\"\"]", 2, "model.aliases");
    check("[tracing]\notlp_endpoint = \"here\"", 2, "tracing.otlp_endpoint must be a URL");
    check("[tracing]\notlp = 1", 2, "otlp_endpoint");
    check("[model.engine]\n\nslots = 0", 3, "model.engine.slots must be between 1 and 128");
    check("[model]\nengine.slots = 300", 2, "model.engine.slots");
    check("[model.engine]\nslots = -1", 2, "-1");
    check("[model.engine]\nslot = 1", 2, "slot");
    check("[model.engine]\nengine = \"sim\"\nsim_decode_tps = -1.0", 3, "sim_decode_tps");
}

#[test]
fn a_wrong_flag_is_named_as_one() {
    let check = |change: fn(&mut RawConfig), flag: &str| {
        let mut file = ConfigFile::default();
        change(&mut file.raw);
        let message = file.check(Vec::new()).unwrap_err().to_string();
        assert!(message.starts_with(flag), "{message}");
    };
    check(|raw| raw.listen = Some("8080".into()), "--listen must be HOST:PORT");
    check(|raw| raw.ollama_listen = Some("x".into()), "--ollama-listen must be HOST:PORT");
    check(|raw| raw.api_keys = vec![String::new()], "--api-key ");
    check(|raw| raw.model.source = Some(String::new()), "--model ");
    check(|raw| raw.model.name = Some(String::new()), "--name ");
    check(|raw| raw.model.engine.ctx_size = Some(1), "--ctx-size must be between 64");
    check(|raw| raw.model.engine.sim_prefill_tps = Some(f64::NAN), "--sim-prefill-tps ");
}

#[test]
fn every_example_is_valid() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs");
    let mut n_files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        check_file(&path).unwrap_or_else(|e| panic!("{e}"));
        n_files += 1;
    }
    assert!(n_files > 0);
}

#[test]
fn a_key_in_the_wrong_place_is_not_repeated() {
    for text in ["api_keys = \"sk-secret\"", "keys = \"sk-secret\"", "[[keys]]\nname = \"a\"\nhash = [\"sk-secret\"]\n"]
    {
        let mistakes = mistakes(text);
        assert!(!mistakes.is_empty() && !format!("{mistakes:?}").contains("secret"), "{mistakes:?}");
    }
}

#[test]
fn every_mistake_is_reported_at_once_with_the_nearest_key() {
    let text = "listen_on = \"h:1\"\nmax_requests = \"many\"\nwhatever = 1\n\n[model]\nsauce = \"x\"\nname = \"\"\n\n\
                [model.engine]\nslot = 1\nctx_size = 1\n\n[[keys]]\nname = \"a\"\nhash = \"secret\"\nmodel = []\n";
    let mistakes = mistakes(text);
    let expected = [
        "line 1: unknown key \"listen_on\"; did you mean \"listen\"?",
        "line 2: max_requests must be a whole number from 1 to 1000000 but is a string",
        "line 3: unknown key \"whatever\"; there are listen,",
        "line 6: unknown key \"sauce\"; did you mean \"source\"?",
        "line 7: model.name must not be empty",
        "line 10: unknown key \"slot\"; did you mean \"slots\"?",
        "line 11: model.engine.ctx_size must be between 64",
        "line 15: keys[0].hash must be a hash as `baton key new` prints it",
        "line 16: unknown key \"model\"; did you mean \"models\"?",
    ];
    assert_eq!(mistakes.len(), expected.len(), "{mistakes:#?}");
    for (mistake, expected) in mistakes.iter().zip(expected) {
        assert!(mistake.starts_with(expected), "{mistakes:#?}");
    }
}

#[test]
fn unusable_values_are_reported_together_with_wrong_ones() {
    let text = "tls_ca = \"/nowhere.pem\"\nmax_quued = 3\n[model]\nprefill = [\"spark.local:9000\", \"b.local:9\"]\n\
                [[upstream]]\nname = \"a\"\nkind = \"openai\"\nurl = \"http://10.0.0.1:1\"\n\
                key_env = \"BATON_NO_SUCH_VARIABLE\"\nmax_concurrent = \"x\"\n[engine]\nslots = 2\n";
    let expected = [
        "line 1: tls_ca cannot be used: TLS: cannot read /nowhere.pem",
        "line 2: unknown key \"max_quued\"; did you mean \"max_queued\" of [model.engine]",
        "line 4: model.prefill is refused: http://spark.local:9000 is plain HTTP to another machine",
        "line 4: model.prefill is refused: http://b.local:9 is plain HTTP",
        "line 8: upstream[0].url is refused: http://10.0.0.1:1 is plain HTTP",
        "line 9: upstream[0].key_env names the variable BATON_NO_SUCH_VARIABLE, which is not set",
        "line 10: upstream[0].max_concurrent must be a whole number from 1 to 10000 but is a string",
        "line 11: unknown table \"engine\" here; did you mean [model.engine]",
    ];
    let mistakes = mistakes(text);
    assert_eq!(mistakes.len(), expected.len(), "{mistakes:#?}");
    for (mistake, expected) in mistakes.iter().zip(expected) {
        assert!(mistake.starts_with(expected), "{mistakes:#?}");
    }
    assert!(mistakes[2].contains("allow_plain_http = true"), "{mistakes:#?}");
}

#[test]
fn urls_of_images_are_only_for_upstreams_that_fetch_and_see() {
    let upstream = |kind: &str, more: &str| {
        format!(
            "[[upstream]]\nname = \"a\"\nkind = \"{kind}\"\nurl = \"http://127.0.0.1:1\"\nimage_urls = true\n{more}"
        )
    };
    for kind in ["openai", "llama-server", "vllm"] {
        for more in ["images = true\n", ""] {
            read(&upstream(kind, more)).unwrap();
        }
    }
    let refused = mistakes(&upstream("openai", "images = false\n"));
    assert!(
        refused.len() == 1 && refused[0].contains("image_urls cannot be true while images is false"),
        "{refused:?}"
    );
    let refused = mistakes(&upstream("ollama", ""));
    assert!(
        refused.len() == 1 && refused[0].contains("image_urls cannot be true: ollama fetches no images"),
        "{refused:?}"
    );
}

#[test]
fn a_value_of_the_wrong_type_is_one_mistake() {
    let mistakes = mistakes("[[upstream]]\nname = \"a\"\nkind = \"openai\"\nurl = 3\n");
    assert_eq!(mistakes.len(), 1, "{mistakes:#?}");
    assert!(mistakes[0].starts_with("line 4: upstream[0].url must be a string but is 3"), "{mistakes:#?}");
}

#[test]
fn an_option_that_the_engine_does_not_have_is_a_mistake_with_its_line() {
    let text = "[model.engine]\nengine = \"candle\"\nslots = 2\ngpu_layers = 9\n[[models]]\nsource = \"m\"\n\
                [models.engine]\nengine = \"mlx\"\nmlock = true\nmlok = true\n[[models]]\nsource = \"sim\"\n\
                [models.engine]\nengine = \"sim\"\ngpu_layers = 9\nsim_decode_tps = 5.0\n";
    let expected = [
        "line 4: model.engine.gpu_layers is not an option of the engine candle, but of llama",
        "line 9: models[0].engine.mlock is not an option of the engine mlx, but of llama",
        "line 10: unknown key \"mlok\"; did you mean \"mlock\"?",
    ];
    assert_eq!(mistakes(text), expected);
}

#[test]
fn a_flag_is_checked_in_place_of_what_the_file_says() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "listen = \"8080\"\nmax_requests = 0\n").unwrap();
    let check = |listen: &str| {
        let file = ConfigFile::read(file.path()).unwrap().with_flags(&flags(&["--listen", listen])).unwrap();
        let Err(ConfigError::Mistakes(mistakes)) = file.check(Vec::new()) else { panic!() };
        assert!(mistakes.in_file[0].starts_with("line 2: max_requests"), "{mistakes:?}");
        assert_eq!(mistakes.in_file.len(), 1, "{mistakes:?}");
        mistakes.flags
    };
    assert_eq!(check("127.0.0.1:1"), Vec::<String>::new());
    assert!(check("9090")[0].starts_with("--listen must be HOST:PORT"));
}

/// The flags of a command line, without the environment's.
fn flags(args: &[&str]) -> ConfigFlags {
    #[derive(clap::Parser)]
    struct ServeFlags {
        #[command(flatten)]
        flags: ConfigFlags,
    }
    ServeFlags::parse_from([&["baton"], args].concat()).flags
}

#[test]
fn only_given_flags_win_over_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("baton.toml");
    let text = "listen = \"h:1\"\napi_keys = [\"a\"]\nallow_plain_http = true\n[model]\nname = \"m\"\n\
                decode = [\"d:1\"]\nprefill = [\"p:1\"]\n[model.engine]\nengine = \"sim\"\nslots = 2\n";
    std::fs::write(&path, text).unwrap();
    let read =
        |args: &[&str]| ConfigFile::read(&path).unwrap().with_flags(&flags(args)).unwrap().check(Vec::new()).unwrap();
    let config = read(&[]);
    assert_eq!((config.startup.listen.as_str(), config.name.as_deref()), ("h:1", Some("m")));
    assert!(config.startup.transport.allow_plain_http && config.routing.calibrate);
    let args =
        ["--name", "n", "--no-calibration", "--decode", "e:1", "--node", "f:1", "--slots", "3", "--api-key", "b"];
    let config = read(&args);
    assert_eq!((config.startup.listen.as_str(), config.name.as_deref()), ("h:1", Some("n")));
    assert!(config.startup.transport.allow_plain_http && !config.routing.calibrate);
    assert_eq!(config.routing.decode, ["http://e:1", "http://f:1"]);
    assert_eq!(config.routing.prefill, ["http://p:1"]);
    assert_eq!((config.startup.engine.slots, config.startup.engine.engine), (Some(3), Some(EngineKind::Sim)));
    assert_eq!(config.access.api_keys, ["b"]);
}

#[test]
fn the_debug_form_of_flags_has_no_values() {
    let debug = format!("{:?}", flags(&["--api-key", "s3cret", "--name", "n"]));
    assert_eq!(debug, "ConfigFlags({\"--api-key\", \"--name\"})");
}

#[test]
fn every_key_that_sounds_secret_is_marked_as_secret() {
    fn search(place: SchemaPlace, path: &str, unmarked: &mut Vec<String>) {
        match place.takes() {
            Takes::List(item) => search(item, path, unmarked),
            Takes::AnyOf(forms) => forms.into_iter().for_each(|form| search(form, path, unmarked)),
            _ => {}
        }
        for (key, value) in place.keys() {
            let path = format!("{path}.{key}");
            let sounds_secret =
                ["key", "hash", "token", "secret", "password", "headers"].iter().any(|word| key.contains(word));
            if sounds_secret && !value.is_secret() {
                unmarked.push(path.clone());
            }
            search(value, &path, unmarked);
        }
    }
    let mut unmarked = Vec::new();
    search(SchemaPlace::root(), "", &mut unmarked);
    // Numbers of tokens.
    let of_keys = [".keys.tokens_per_minute", ".keys.tokens_per_day", ".keys.tokens_per_month"];
    assert_eq!(unmarked, [&of_keys[..], &[".upstream.default_max_tokens"]].concat());
}

#[test]
fn changes_that_need_a_restart_are_named() {
    let checked = |text: &str| read(text).unwrap();
    let old = checked("[model]\nsource = \"m\"\n");
    let check = |text: &str, startup: &[&str], routing: &[&str]| {
        let new = checked(text);
        assert_eq!(old.startup.changed_keys(&new.startup), startup, "{text}");
        assert_eq!(old.routing.changed_keys(&new.routing), routing, "{text}");
    };
    check("allowed_hosts = [\"h\"]\n[model]\nsource = \"m\"\nname = \"n\"\n", &[], &[]);
    check(
        "listen = \"h:1\"\n[model]\nsource = \"o\"\nengine.slots = 2\n",
        &["listen", "model.source", "model.engine"],
        &[],
    );
    check(
        "[model]\nsource = \"m\"\npolicy = \"direct\"\nprefill = [\"127.0.0.1:1\"]\n",
        &[],
        &["model.prefill", "model.policy"],
    );
}

#[test]
fn passwords_and_keys_in_the_wrong_place_are_not_repeated() {
    for (text, line) in [
        ("[model]\nprefill = [\"http://u:s3cret@10.0.0.1:9000\"]\n", "line 2: model.prefill must be HOST:PORT"),
        (
            "[model]\nprefill = \"http://u:s3cret@10.0.0.1:9000\"\n",
            "line 2: model.prefill must be a list but is a string",
        ),
        (
            "[[upstream]]\nname = \"a\"\nkind = \"openai\"\nurl = \"http://127.0.0.1:1\"\nkey_env = \"sk-s3cret\"\n",
            "line 5: upstream[0].key_env must be a variable's name",
        ),
        (
            "[[upstream]]\nname = \"a\"\nkind = \"openai\"\nurl = \"http://127.0.0.1:1\"\nkey = 53\n",
            "line 5: upstream[0].key",
        ),
        (
            "[[upstream]]\nname = \"a\"\nkind = \"openai\"\nurl = \"http://127.0.0.1:1\"\nheaders = { x = 53 }\n",
            "line 5: upstream[0].headers.x must be a string but is a number",
        ),
        ("api_keys = [\"a\", 53]\n", "line 1: api_keys[1] must be a string but is a number"),
    ] {
        let mistakes = mistakes(text);
        assert!(mistakes[0].starts_with(line), "{mistakes:?}");
        assert!(!format!("{mistakes:?}").contains("s3cret") && !format!("{mistakes:?}").contains("53"), "{mistakes:?}");
    }
}

#[test]
fn numbers_that_are_no_times_are_mistakes_like_others() {
    for wrong in ["-1", "1e300", "nan"] {
        let mistakes = mistakes(&format!("max_requests = 0\n[loading]\nmax_wait_seconds = {wrong}\n"));
        assert!(mistakes[0].starts_with("line 1: max_requests") && mistakes[1].starts_with("line 3: "), "{mistakes:?}");
        let raw: on_demand_models::RawLoading = toml::from_str(&format!("max_wait_seconds = {wrong}")).unwrap();
        assert_eq!(raw.typed().max_wait, Duration::ZERO, "it is asked for what fits before it is refused");
    }
}

#[test]
fn an_upstreams_key_comes_from_the_file_or_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("a.key"), "sk-1\n").unwrap();
    std::fs::write(folder.path().join("huge.key"), vec![b'k'; 1 << 17]).unwrap();
    let path = folder.path().join("baton.toml");
    let key = |from: &str| {
        let upstream = "[[upstream]]\nname = \"a\"\nkind = \"openai\"\nurl = \"http://127.0.0.1:1\"\n";
        std::fs::write(&path, format!("{upstream}{from}\n")).unwrap();
        check_file(&path).map(|config| config.upstreams[0].key.clone().unwrap()).map_err(|error| error.to_string())
    };
    assert_eq!(key("key_file = \"a.key\"").unwrap(), "sk-1", "beside the configuration");
    assert_eq!(key("key_env = \"CARGO_PKG_NAME\"").unwrap(), "baton-proxy");
    assert!(key("key_file = \"huge.key\"").unwrap_err().contains("larger than"));
}

#[test]
fn relative_paths_start_where_the_file_lies() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("baton.toml");
    let text = "[model]\nsource = \"m.gguf\"\n[model.engine]\nmmproj = \"p.gguf\"\nlora_scaled = \"a.gguf:0.5\"\n\
                [[models]]\nsource = \"./n\"\n[[models]]\nsource = \"smollm2\"\n[[models]]\n\
                source = \"o/r:f.gguf\"\n[[models]]\nsource = \"/a.gguf\"\n";
    std::fs::write(&path, text).unwrap();
    let config = check_file(&path).unwrap();
    assert_eq!(Path::new(&config.startup.source), folder.path().join("m.gguf"));
    assert_eq!(config.startup.engine.mmproj, Some(folder.path().join("p.gguf")));
    assert_eq!(config.startup.engine.lora_file().unwrap().path, folder.path().join("a.gguf"));
    let sources: Vec<&str> = config.models.iter().map(|model| model.source.as_str()).collect();
    assert_eq!(sources[1..], ["smollm2", "o/r:f.gguf", "/a.gguf"]);
    assert_eq!(Path::new(sources[0]), folder.path().join("./n"));
}

#[test]
fn a_file_that_can_be_read_only_once_is_refused() {
    let error = ConfigFile::read(Path::new("/dev/null")).err().unwrap().to_string();
    assert!(error.contains("no regular file"), "{error}");
}

#[test]
fn a_syntax_error_is_reported_with_its_line() {
    let message = read("listen = \"a:1\"\nmodel = = 3\n").unwrap_err();
    assert!(message.contains("line 2: "), "{message}");
}

#[test]
fn keys_have_limits_and_are_operators_only_if_configured() {
    let hash = hash_text(&crate::http::key_hash(b"k"));
    let config = read(&format!(
        "[[keys]]\nname = \"anna\"\nhash = \"{hash}\"\nmodels = [\"m\"]\nrequests_per_minute = 3\nmax_concurrent = 2\n"
    ))
    .unwrap();
    let account = &config.access.keys[0].account;
    assert_eq!((account.name.as_str(), account.limits.requests_per_minute), ("anna", Some(3)));
    assert!(account.may_use(["M".to_owned()].iter()) && !account.may_use(["other".to_owned()].iter()));
    assert!(!account.limits.is_operator && !account.limits.may_choose_policy && config.access.needs_key());
    let twice = format!("[[keys]]\nname = \"a\"\nhash = \"{hash}\"\n[[keys]]\nname = \"b\"\nhash = \"{hash}\"\n");
    assert!(read(&twice).unwrap_err().contains("line 6: keys[1].hash must not be another key's hash"));
    assert!(read("[[keys]]\nrequests_per_minute = 0\n").unwrap_err().contains("line 2: "));
}

#[test]
fn the_cluster_key_travels_unencrypted_only_if_allowed() {
    let at = |more: &str| read(&format!("{more}[model]\nprefill = [\"spark.local:9000\"]\n"));
    assert!(at("").unwrap_err().contains("spark.local"));
    assert_eq!(at("allow_plain_http = true\n").unwrap().routing.prefill, ["http://spark.local:9000"]);
    assert!(read("tls_ca = \"/nowhere.pem\"\n").unwrap_err().contains("/nowhere.pem"));
}

#[test]
fn an_engine_is_started_here_unless_nodes_generate_instead() {
    let example = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs").join(name);
        check_file(&path).unwrap()
    };
    let thin = example("two-sparks-two-macs.toml");
    assert!(!thin.routing.has_own_engine, "it runs on any machine");
    assert_eq!(thin.routing.decode.len(), 4);
    assert!(thin.routing.prefill.iter().all(|node| thin.routing.decode.contains(node)), "the Sparks do both");
    let mac = example("spark-mac.toml");
    assert!(mac.routing.has_own_engine && mac.routing.decode.is_empty());
    assert_eq!(mac.routing.prefill, ["https://spark.local:9000"]);
    let both = read("allow_plain_http = true\n[model]\nsource = \"m\"\ndecode = [\"a:1\"]").unwrap();
    assert!(both.routing.has_own_engine && both.routing.decode == ["http://a:1"], "beside nodes");
    assert!(read("[model]\ndecode = [\"a:1\"]").unwrap_err().contains("--allow-plain-http"));
    // On a paired machine an address without a scheme is TLS. If plain HTTP is allowed, the pairing is not used.
    let paired = |text: &str| {
        let file = ConfigFile::parse(Path::new("/baton.toml"), text.to_owned()).unwrap();
        file.with_pairing(Some("/absent".into())).check(Vec::new()).map_err(|error| error.to_string())
    };
    let twice = "[model]\ndecode = [\"a:1\", \"https://a:1\"]";
    assert!(paired(twice).unwrap_err().contains("names https://a:1 twice"));
    assert_eq!(paired(&format!("allow_plain_http = true\n{twice}")).unwrap().routing.decode[0], "http://a:1");
    assert!(read("[model]\ndecode = [\"a\", \"http://a/\"]").unwrap_err().contains("twice"));
    assert!(read("\n[model]\n\ndecode = [\"a b\"]").unwrap_err().contains("line 4: model.decode"));
}

#[test]
fn deadlines_are_bounded_and_hedging_is_one_line() {
    assert!(!read("").unwrap().routing.deadlines.hedge);
    let config = read("[deadlines]\nhedge = true\nfloor_ms = 500\n").unwrap();
    assert!(config.routing.deadlines.hedge && config.routing.deadlines.floor == Duration::from_millis(500));
    for (text, message) in [
        ("[deadlines]\nfactor = 0.5", "line 2: deadlines.factor must be between 1 and 1000"),
        ("[deadlines]\nfactor = nan", "line 2: deadlines.factor must be between 1 and 1000"),
        ("[deadlines]\nmax_ms = 5", "line 2: deadlines.max_ms must be between 100 and 3600000"),
        ("[deadlines]\nmax_ms = 5000", "deadlines.floor_ms must be at most deadlines.max_ms, which is 5000"),
        ("[deadlines]\nhedging = true", "line 2: unknown key \"hedging\"; did you mean \"hedge\"?"),
    ] {
        let told = read(text).unwrap_err();
        assert!(told.contains(message), "{told}");
    }
}

#[test]
fn machines_that_can_be_woken_are_named_by_nodes_that_there_are() {
    let wake =
        |more: &str| format!("[model]\ndecode = [\"127.0.0.1:9000\"]\n[[wake]]\nnode = \"127.0.0.1:9000\"\n{more}");
    let config = read(&wake("mac = \"A4-83-E7-12-34-56\"\n")).unwrap();
    let marked = &config.routing.wake[0];
    assert_eq!((&*marked.node, &*marked.settings.mac.to_string()), ("http://127.0.0.1:9000", "a4:83:e7:12:34:56"));
    assert_eq!((marked.settings.to, marked.settings.longest), (None, Duration::from_secs(90)));
    let more = "mac = \"a4:83:e7:12:34:56\"\nbroadcast = \"10.0.0.255\"\nmax_wait_seconds = 20\n";
    let settings = read(&wake(more)).unwrap().routing.wake[0].settings;
    assert_eq!((settings.to, settings.longest), (Some("10.0.0.255:9".parse().unwrap()), Duration::from_secs(20)));
    let found = "discover = true\n[[wake]]\nnode = \"mac\"\nmac = \"a4:83:e7:12:34:56\"\n";
    assert_eq!(read(found).unwrap().routing.wake[0].node, "mac");
    let mac = "mac = \"a4:83:e7:12:34:56\"";
    for (text, message) in [
        (wake(""), "wake[0].mac is missing: no machine of this name"),
        (wake("mac = \"ff:ff:ff:ff:ff:ff\""), "line 5: wake[0].mac must be six bytes"),
        (wake(&format!("{mac}\nbroadcast = \"here\"")), "line 6: wake[0].broadcast must be an IPv4 address"),
        (wake(&format!("{mac}\nbroadcast = \"10.0.0.255:0\"")), "wake[0].broadcast must be an IPv4 address"),
        (wake(&format!("{mac}\nmax_wait_seconds = 0")), "wake[0].max_wait_seconds must be between 1 and 600"),
        (wake(&format!("{mac}\nmax_wait_seconds = nan")), "wake[0].max_wait_seconds must be between 1 and 600"),
        (wake(&format!("{mac}\nport = 9")), "unknown key \"port\""),
        (wake(&format!("{mac}\n[[wake]]\nnode = \"http://127.0.0.1:9000/\"\n{mac}")), "wake[1].node names"),
        (format!("[[wake]]\nnode = \"spark:9000\"\n{mac}"), "wake[0].node must be an address of model.decode"),
        (format!("[[wake]]\nnode = \"spark\"\n{mac}"), "wake[0].node is a name, which only found nodes have"),
        (format!("[[wake]]\n{mac}"), "wake[0].node must not be empty"),
    ] {
        let told = read(&text).unwrap_err();
        assert!(told.contains(message), "{text}: {told}");
    }
}

#[test]
fn upstreams_are_checked_and_their_keys_never_repeated() {
    let at = |more: &str| {
        read(&format!("[[upstream]]\nname = \"a\"\nkind = \"openai\"\nurl = \"http://127.0.0.1:1\"\n{more}"))
    };
    let config = at("models = { m = \"theirs\" }\nkey = \"sk-1\"\nidle_seconds = 2").unwrap();
    assert!(!config.routing.has_own_engine, "an upstream generates");
    let upstream = &config.upstreams[0];
    assert_eq!((upstream.models[0].theirs.as_str(), upstream.key.as_deref()), ("theirs", Some("sk-1")));
    assert!(!format!("{config:?}").contains("sk-1"));
    let check = |more: &str, expected: &str| {
        let message = at(more).unwrap_err();
        assert!(message.contains(expected), "{more}: {message}");
        assert!(!message.contains("secret"), "{message}");
    };
    check("max_concurent = 3", "line 5: unknown key \"max_concurent\"; did you mean \"max_concurrent\"?");
    check("max_concurrent = 0", "line 5: upstream[0].max_concurrent must be between 1");
    check("num_ctx = 4096", "upstream[0].num_ctx is for upstreams of kind ollama");
    check("prefill = [\"http://127.0.0.1:2\"]", "upstream[0].prefill is for upstreams of kind vllm");
    check("fields = [\"magic\"]", "upstream[0].fields has \"magic\"");
    check("headers = { host = \"x\" }", "upstream[0].headers");
    check("same_models = true", "upstream[0].same_models needs a table of models");
    check("capabilities = [\"tools\", \"flying\"]", "upstream[0].capabilities has \"flying\"; there are tools,");
    check("same_models = 1", "line 5: upstream[0].same_models");
    check("idle_seconds = 0.0", "upstream[0].idle_seconds must be between");
    check("models = { m = \"a\", \"M:latest\" = \"b\" }", "upstream[0].models has a name twice");
    check("key = \"secret\"\nkey_env = \"X\"", "upstream[0].key may be given once");
    check("key = [\"secret\"]", "line 5: upstream[0].key");
    check("key = \"secret secret\"", "line 5: upstream[0].key holds a key that is empty, or has characters");
    check(
        "key_env = \"BATON_NO_SUCH_VARIABLE\"",
        "line 5: upstream[0].key_env names the variable BATON_NO_SUCH_VARIABLE",
    );
    check("key_file = \"/nowhere.key\"", "line 5: upstream[0].key_file cannot be read: /nowhere.key");
    let message = read("[[upstream]]\nname = \"a b\"\nkind = \"opanai\"\nurl = \"http://u:secret@h/\"\n").unwrap_err();
    for expected in
        ["line 2: upstream[0].name", "line 3: upstream[0].kind must be one of ollama,", "line 4: upstream[0].url"]
    {
        assert!(message.contains(expected), "{message}");
    }
    assert!(read("[[upstream]]\nname = \"a\"\nkind = \"ollama\"\nurl = \"http://10.0.0.1:11434\"\n").is_err());
}

#[test]
fn a_wrong_word_is_named_with_those_that_are_right() {
    let check = |text: &str, expected: &str| {
        let message = read(text).unwrap_err();
        assert!(message.contains(expected), "{text}: {message}");
    };
    check(
        "[model.engine]\nengine = \"lama\"\n",
        "line 2: model.engine.engine must be one of llama, candle, mlx, sim, not \"lama\"",
    );
    check(
        "[model.engine]\nengine = 1\n",
        "line 2: model.engine.engine must be one of llama, candle, mlx, sim but is 1",
    );
    check(
        "[model.engine]\nkv_codecs = [\"zip\"]\n",
        "kv_codecs[0] must be one of none, planes_zstd, q8_0, kvq, kvq_fast, state_f16, state_int8, not \"zip\"",
    );
    check("[model.sampling]\nrepeat_last_n = 4294967296\ntemperature = 9\n", "temperature must be between");
    check(
        "[model.sampling]\nrepeat_last_n = 4294967296\n",
        "line 2: model.sampling.repeat_last_n must be a whole number",
    );
    check("[model.sampling]\nrepeat_last_n = -2\n", "model.sampling.repeat_last_n must be");
    assert!(read("[model.sampling]\nrepeat_last_n = -1\n").is_ok());
    check("[model.engine]\nkv_codecs = []\n", "line 2: model.engine.kv_codecs must name at least one codec");
    check("[model.engine]\ncache_type_k = \"q3\"\n", "line 2: model.engine.cache_type_k must be one of f32, f16, bf16");
    let quantized = "[model]\nprefill = [\"127.0.0.1:1\"]\nengine.engine = \"sim\"\nengine.cache_type_v = \"q8_0\"\n";
    assert!(read(quantized).is_ok(), "quantized caches are handed over, too");
    check("lossy_kv = \"never\"\n", "line 1: lossy_kv must be one of allowed, on_request, not \"never\"");
    check(
        "[model.engine]\nlend_layers = \"some\"\n",
        "line 2: model.engine.lend_layers must be a whole number from 0 to 4294967295 or one of auto, not \"some\"",
    );
    check("[model.engine]\nflash_attn = \"off\"\n", "line 2: model.engine.flash_attn cannot be off");
    check("[model.engine]\nn_gpu_layers = 9\n", "line 2: unknown key \"n_gpu_layers\"; did you mean \"gpu_layers\"?");
}

#[test]
fn a_draft_model_without_speculation_is_remarked_with_its_line() {
    let remarks = |text: &str| {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let start = format!("{}: ", file.path().display());
        let remarks = ConfigFile::read(file.path()).unwrap().remarks();
        remarks.iter().map(|remark| remark.strip_prefix(&start).unwrap().to_owned()).collect::<Vec<_>>()
    };
    let engine = |table: &str, speculation: &str| {
        format!("[{table}.engine]\nspeculation = \"{speculation}\"\ndraft = \"small.gguf\"\n")
    };
    let two = format!("{}[[models]]\nsource = \"a\"\n{}", engine("model", "off"), engine("models", "off"));
    let unused =
        |line: usize, table: &str| format!("line {line}: {table}.engine.draft is not used, because speculation is off");
    assert_eq!(remarks(&two), [unused(3, "model"), unused(8, "models[0]")]);
    assert_eq!(remarks(&engine("model", "auto")), [""; 0]);
    assert_eq!(remarks("[model.engine]\ndraft = \"small.gguf\"\n"), [""; 0], "a draft model turns speculation on");
    assert_eq!(remarks("[model.engine]\nspeculation = \"off\"\n"), [""; 0]);
}

#[test]
fn on_demand_models_are_read_with_their_defaults_and_checked_together() {
    let config = read("[[models]]\nsource = \"a.gguf\"\n[[models]]\nsource = \"b.gguf\"\nkeep_alive = -1\n").unwrap();
    assert!(!config.routing.has_own_engine, "they are loaded when they are asked for");
    let keep_alive: Vec<KeepAlive> = config.models.iter().map(|model| model.keep_alive).collect();
    assert_eq!(keep_alive, [KeepAlive::For(Duration::from_secs(300)), KeepAlive::Forever]);
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/several-models.toml");
    let example = check_file(&example).unwrap();
    assert_eq!((example.models.len(), example.loading.budget()), (2, 24 << 30));
    assert_eq!((example.models[0].engine.slots, example.models[0].sampling.temperature), (Some(2), Some(0.2)));
    let beside = read("[model]\nsource = \"m\"\n[[models]]\nsource = \"a\"\n").unwrap();
    assert!(beside.routing.has_own_engine && beside.models.len() == 1);

    let check = |text: &str, line: usize, part: &str| {
        let message = read(text).unwrap_err();
        assert!(message.contains(&format!("line {line}: ")) && message.contains(part), "{text}: {message}");
    };
    check("[[models]]\nname = \"a\"\n", 1, "models[0].source must be");
    check("[[models]]\nsource = \"a\"\nkeep = 1\n", 3, "did you mean \"keep_alive\"");
    check("[[models]]\nsource = \"a\"\nkeep_alive = \"soon\"\n", 3, "must be a duration");
    check("[[models]]\nsource = \"a\"\n[models.engine]\nslots = 0\n", 4, "models[0].engine.slots");
    check("[[models]]\nsource = \"a\"\n[models.engine]\nslot = 0\n", 4, "did you mean \"slots\"");
    check("[[models]]\nsource = \"a\"\n[models.sampling]\ntemperature = 9\n", 4, "models[0].sampling.temperature");
    check("[model.sampling]\ntop_q = 1\n", 2, "did you mean \"top_");
    check("[model.sampling]\ntop_p = 2\n", 2, "model.sampling.top_p must be between 0 and 1");
    let twice = "[model]\nname = \"m\"\n[[models]]\nsource = \"a\"\naliases = [\"M:latest\"]\n";
    check(twice, 5, "which another model is called too");
    check("[loading]\nmemory_budget = \"24 gigs\"\n", 2, "loading.memory_budget must be");
    check("[loading]\nmax_waiting = 0\n", 2, "loading.max_waiting");
    check("[loading]\nmax_wait_seconds = 0\n", 2, "loading.max_wait_seconds");
    let budget = |size: &str| read(&format!("[loading]\nmemory_budget = {size}\n")).unwrap().loading.budget();
    assert_eq!([budget("\"1.5GiB\""), budget("\"500 MB\""), budget("7")], [3 << 29, 500_000_000, 7]);
    assert!(read("").unwrap().loading.budget() > 1 << 20, "a part of what the machine has");
}

#[test]
fn the_two_addresses_differ() {
    let check = |listen: &str, ollama: &str, is_fine: bool| {
        let listen = if listen.is_empty() { String::new() } else { format!("listen = {listen:?}\n") };
        let outcome = read(&format!("{listen}ollama_listen = {ollama:?}\n"));
        match outcome {
            Ok(_) => assert!(is_fine, "{listen} {ollama}"),
            Err(error) => assert!(!is_fine && error.contains("ollama_listen must not be the same"), "{error}"),
        }
    };
    check("", "127.0.0.1:8080", false);
    check("", "localhost:8080", false);
    check("", "0.0.0.0:8080", false);
    check("[::]:11434", "127.0.0.1:11434", false);
    check("10.0.0.1:11434", "127.0.0.1:11434", true);
    check("127.0.0.1:0", "127.0.0.1:0", true);
    check("", "127.0.0.1:11434", true);
}

#[test]
fn a_missing_hash_is_not_reported_as_a_wrong_one() {
    let error = read("[[keys]]\nname = \"a\"\n\n[[keys]]\nname = \"b\"\n").unwrap_err();
    assert_eq!(error.matches("hash is missing").count(), 2, "{error}");
    assert!(!error.contains("another key's hash"), "{error}");
}
