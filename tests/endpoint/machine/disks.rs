//! Full disks: under the cache of models, under the folder of an engine's socket, and under the configuration.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use harness::lab::with_namespaces;
use harness::{BATON, BatonNode, BatonServer, eventually, eventually_async};
use rustix::process::{Signal, kill_process};
use serde_json::json;
use tokio::runtime::Runtime;

use super::{SIM, status};

const MIB: usize = 1 << 20;

/// The size of the model file, and the sha256 of its bytes: `GGUF` and zeros.
const N_BYTES: usize = 3 * MIB;
const SHA256: &str = "92f3e90fb07ead19230af1eb5c71f4b4c3571e12adf7da1e789227d9106b5fb6";

/// A disk of its own, in memory. Dropping it removes it.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(options: &str) -> SmallDisk {
        let disk = SmallDisk(tempfile::tempdir().unwrap());
        disk.mount(options);
        disk
    }

    fn mount(&self, options: &str) {
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(self.path()).status();
        assert!(mounted.unwrap().success(), "no disk was mounted");
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// Leaves room again.
    fn free(&self) {
        let files = std::fs::read_dir(self.path()).unwrap().flatten().map(|entry| entry.path());
        let fillers = files.filter(|file| file.file_name().unwrap().to_string_lossy().starts_with(FILLER));
        fillers.for_each(|file| std::fs::remove_file(file).unwrap());
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(self.path()).status();
    }
}

const FILLER: &str = "filler-";

/// Makes files until a disk takes no more.
fn fill(disk: &Path) {
    let files = (0..).map(|i| disk.join(format!("{FILLER}{i}")));
    let n = files.take_while(|file| std::fs::write(file, [0; 4096]).is_ok()).count();
    assert!(n > 0, "nothing was written");
}

/// Waits until most of the first half of the file is on a disk.
fn wait_for_half(disk: &Path) {
    eventually("half of the file on the disk", || {
        let disk = rustix::fs::statvfs(disk).unwrap();
        ((disk.f_blocks - disk.f_bfree) * disk.f_frsize >= MIB as u64).then_some(())
    });
}

/// A hub with one model file. In the middle of the first transfer the disk is filled.
fn hub(disk: &SmallDisk) -> String {
    let filling = Arc::new(Mutex::new(Some(disk.path().to_owned())));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let filling = Arc::clone(&filling);
            std::thread::spawn(move || answer(stream.unwrap(), &filling));
        }
    });
    url
}

fn answer(mut stream: TcpStream, filling: &Mutex<Option<PathBuf>>) -> Option<()> {
    let mut lines = BufReader::new(stream.try_clone().ok()?).lines();
    let asked = lines.next()?.ok()?;
    let head: Vec<String> = lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    let (body, head) = if asked.contains("/api/models/") {
        let file = json!({ "rfilename": "tiny.gguf", "size": N_BYTES, "lfs": { "sha256": SHA256 } });
        (json!({ "sha": "c0ffee", "siblings": [file] }).to_string().into_bytes(), "200 OK".to_owned())
    } else {
        let from = head
            .iter()
            .find_map(|line| line.to_lowercase().strip_prefix("range: bytes=")?.split_once('-')?.0.parse().ok());
        let from: usize = from.unwrap_or(0);
        let whole = [b"GGUF".to_vec(), vec![0; N_BYTES - 4]].concat();
        let range = format!("206 Partial Content\r\nContent-Range: bytes {from}-{}/{N_BYTES}", N_BYTES - 1);
        (whole[from..].to_vec(), if from == 0 { "200 OK".to_owned() } else { range })
    };
    write!(stream, "HTTP/1.1 {head}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len()).ok()?;
    let (first, rest) = body.split_at(body.len() / 2);
    stream.write_all(first).ok()?;
    if body.len() > MIB
        && let Some(disk) = filling.lock().unwrap().take()
    {
        wait_for_half(&disk);
        fill(&disk);
    }
    stream.write_all(rest).ok()
}

fn pull(hub: &str, cache: &Path) -> Output {
    let mut command = Command::new(&*BATON);
    command.args(["pull", "nobody/model:tiny.gguf"]).env("HF_ENDPOINT", hub).env("BATON_CACHE", cache);
    command.output().unwrap()
}

#[test]
fn a_pull_onto_a_full_disk_fails_and_goes_on_once_there_is_room() {
    with_namespaces("machine::disks::a_pull_onto_a_full_disk_fails_and_goes_on_once_there_is_room", || {
        let disk = SmallDisk::new("size=2m");
        let hub = hub(&disk);
        let fails = |why: &str| {
            let full = pull(&hub, disk.path());
            let error = String::from_utf8(full.stderr).unwrap();
            assert!(!full.status.success() && error.contains(why), "{error}");
            assert!(find(disk.path(), "tiny.gguf").is_none(), "no incomplete file has the model's name");
        };
        fails("not enough free disk space");
        disk.mount("remount,size=4m");
        fails("the disk is full");
        disk.free();
        let pulled = pull(&hub, disk.path());
        let path = String::from_utf8(pulled.stdout).unwrap();
        assert!(pulled.status.success(), "{}", String::from_utf8_lossy(&pulled.stderr));
        assert_eq!(std::fs::metadata(path.trim()).unwrap().len(), N_BYTES as u64);
    });
}

#[test]
fn a_copy_from_another_machine_onto_a_full_disk_fails_and_goes_on_once_there_is_room() {
    with_namespaces(
        "machine::disks::a_copy_from_another_machine_onto_a_full_disk_fails_and_goes_on_once_there_is_room",
        || {
            let (disk, from) = (SmallDisk::new("size=2m"), tempfile::tempdir().unwrap());
            let model = from.path().join("hub/me/one/a.gguf");
            std::fs::create_dir_all(model.parent().unwrap()).unwrap();
            std::fs::write(&model, vec![7; N_BYTES]).unwrap();
            let node = |folder: &Path| {
                BatonNode::with_variables(&["--engine", "sim"], &[("BATON_CACHE", folder.to_str().unwrap())])
            };
            let (sender, receiver) = (node(from.path()), node(disk.path()));
            let nodes = ["--decode", &sender.url, "--decode", &receiver.url, "--allow-model-management"];
            let server = BatonServer::with(&nodes);
            let copy = || {
                let order = ["models", "copy", "me/one:a.gguf", "--from", "decode-1", "--to", "decode-2", &server.base];
                Command::new(&*BATON).args(order).output().unwrap()
            };
            let full = copy();
            let error = String::from_utf8(full.stderr).unwrap();
            assert!(!full.status.success() && error.contains("not enough free disk space"), "{error}");
            assert!(find(disk.path(), "a.gguf").is_none());
            disk.mount("remount,size=4m");
            let copied = copy();
            assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
            let path = find(disk.path(), "a.gguf").unwrap();
            assert_eq!(std::fs::metadata(path).unwrap().len(), N_BYTES as u64);
        },
    );
}

/// The file with this name somewhere in a folder.
fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    let entries: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path()).collect();
    entries.into_iter().find_map(|path| match path.is_dir() {
        true => find(&path, name),
        false => path.ends_with(name).then_some(path),
    })
}

#[test]
fn an_endpoint_without_room_for_its_engines_socket_says_so_and_does_not_start() {
    with_namespaces(
        "machine::disks::an_endpoint_without_room_for_its_engines_socket_says_so_and_does_not_start",
        || {
            let disk = SmallDisk::new("size=1m,nr_inodes=8");
            fill(disk.path());
            let mut command = Command::new(&*BATON);
            command.args(["serve", "--listen", "127.0.0.1:0"]).args(SIM).env("TMPDIR", disk.path());
            let ended = command.output().unwrap();
            let error = String::from_utf8(ended.stderr).unwrap();
            assert_eq!(ended.status.code(), Some(1), "{error}");
            assert!(error.contains("No space left on device") && error.contains("TMPDIR"), "{error}");
        },
    );
}

#[test]
fn an_engine_that_ends_while_the_disk_is_full_is_back_once_there_is_room() {
    with_namespaces("machine::disks::an_engine_that_ends_while_the_disk_is_full_is_back_once_there_is_room", || {
        let disk = SmallDisk::new("size=1m,nr_inodes=16");
        let folder = disk.path().to_str().unwrap();
        let server = BatonServer::started(Stdio::inherit(), &SIM, &[("TMPDIR", folder)]);
        Runtime::new().unwrap().block_on(async {
            let client = reqwest::Client::new();
            assert_eq!(status(&client, &server, "sim").await, 200);
            fill(disk.path());
            assert_eq!(status(&client, &server, "sim").await, 200, "nothing is written while it serves");
            kill_process(server.engine(), Signal::KILL).unwrap();
            let meanwhile = status(&client, &server, "sim").await;
            assert!([200, 503].contains(&meanwhile), "{meanwhile}");
            assert!(server.get_text("/metrics").await.contains("baton_"));
            disk.free();
            eventually_async("another engine", async || status(&client, &server, "sim").await == 200).await;
        });
    });
}

#[test]
fn a_configuration_that_a_full_disk_has_cut_changes_nothing() {
    with_namespaces("machine::disks::a_configuration_that_a_full_disk_has_cut_changes_nothing", || {
        let disk = SmallDisk::new("size=64k");
        let config = disk.path().join("baton.toml");
        let text = "[[models]]\nname = \"one\"\nsource = \"smollm2\"\n[models.engine]\nengine = \"sim\"\n";
        std::fs::write(&config, text).unwrap();
        let log = tempfile::NamedTempFile::new().unwrap();
        let server = BatonServer::logging_to(log.reopen().unwrap(), &["--config", config.to_str().unwrap()]);
        fill(disk.path());
        // An editor that writes in place has emptied the file before it learns that there is no room.
        std::fs::File::create(&config).unwrap();
        server.signal(Signal::HUP);
        Runtime::new().unwrap().block_on(async {
            let logged = || std::fs::read_to_string(log.path()).unwrap();
            eventually_async("the refusal", async || logged().contains("stays as it was")).await;
            assert_eq!(status(&reqwest::Client::new(), &server, "one").await, 200);
        });
    });
}

#[test]
fn a_full_disk_under_the_usage_refuses_no_request_and_loses_no_count() {
    with_namespaces("machine::disks::a_full_disk_under_the_usage_refuses_no_request_and_loses_no_count", || {
        let disk = SmallDisk::new("size=256k");
        let folder = disk.path().to_str().unwrap();
        let log = tempfile::NamedTempFile::new().unwrap();
        let args = [&SIM[..], &["--state-folder", folder]].concat();
        let server = BatonServer::logging_to(log.reopen().unwrap(), &args);
        Runtime::new().unwrap().block_on(async {
            let client = reqwest::Client::new();
            assert_eq!(status(&client, &server, "sim").await, 200);
            fill(disk.path());
            // SQLite first uses up what it has allocated.
            let logged = || std::fs::read_to_string(log.path()).unwrap();
            let mut n = 1;
            while !logged().contains("the usage cannot be written") {
                assert_eq!(status(&client, &server, "sim").await, 200);
                n += 1;
                assert!(n < 1_000, "the disk is never full");
            }
            for _ in 0..3 {
                assert_eq!(status(&client, &server, "sim").await, 200);
                n += 1;
            }
            let gauge = async |name: &str| {
                let metrics = server.get_text("/metrics").await;
                let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
                value.unwrap_or_else(|| panic!("{name} in {metrics}"))
            };
            assert!(gauge("baton_usage_unsaved_requests").await >= 3);
            assert!(gauge("baton_usage_failed_writes_total").await >= 1);
            disk.free();
            eventually_async("room", async || gauge("baton_usage_unsaved_requests").await == 0).await;
            let usage = server.get("/baton/usage").await;
            assert_eq!(usage["rows"][0]["requests"], n, "{usage}");
            assert!(logged().contains("the usage is written again"));
        });
    });
}
