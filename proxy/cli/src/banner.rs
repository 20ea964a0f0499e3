//! The ready message of `baton serve`: commands to paste.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use baton_schemas::node::NodeInfo;

use super::engine_line::engine_line;

/// The ready message of a server.
pub(super) struct Banner<'a> {
    /// The endpoint's own address.
    pub address: SocketAddr,
    /// This machine's address in its network, if the endpoint can be reached there.
    pub lan: Option<IpAddr>,
    /// The second address, for Ollama's clients.
    pub ollama: Option<SocketAddr>,
    /// The model that the commands name. `None` if no model is known yet.
    pub model: Option<&'a str>,
    /// Other models that are served.
    pub others: &'a [String],
    /// The engine of that model, if it is known.
    pub engine: Option<&'a NodeInfo>,
    /// True if requests must present an API key.
    pub needs_key: bool,
    /// False if the model has no chat template and only continues texts.
    pub chats: bool,
}

/// A request of each client, and where in a chunk its text is.
struct PasteLines {
    path: &'static str,
    json: &'static str,
    call: &'static str,
    python: &'static str,
    text: &'static str,
}

const CHAT: PasteLines = PasteLines {
    path: "chat/completions",
    json: r#""messages":[{"role":"user","content":"Why is the sky blue?"}]"#,
    call: "chat.completions",
    python: r#"messages=[{"role": "user", "content": "Why is the sky blue?"}]"#,
    text: "delta.content or \"\"",
};

const COMPLETION: PasteLines = PasteLines {
    path: "completions",
    json: r#""prompt":"The sky is blue because","max_tokens":64"#,
    call: "completions",
    python: r#"prompt="The sky is blue because", max_tokens=64"#,
    text: "text",
};

impl fmt::Display for Banner<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Banner { address, lan, ollama, model, others, engine, needs_key, chats } = *self;
        let base = format!("http://{}", reachable(address));
        let elsewhere = lan.map_or_else(String::new, |lan| {
            format!("\nFrom other machines: http://{}/v1", SocketAddr::new(lan, address.port()))
        });
        let ollama = ollama.map_or_else(|| base.clone(), |address| format!("http://{}", reachable(address)));
        let (key, header) = match needs_key {
            true => ("YOUR_KEY", " -H 'Authorization: Bearer YOUR_KEY'"),
            false => ("none", ""),
        };
        let others = match others {
            [] => String::new(),
            _ => format!("Other models: {}\n", others.join(", ")),
        };
        let Some(model) = model else {
            return write!(
                f,
                r#"
Baton serves the models of its upstreams at {base}/v1{elsewhere}
None has listed a model yet. When one answers, this lists its models:

  curl {base}/v1/models{header}

{others}Stop with Ctrl-C.
Watch it in a browser: {base}/"#
            );
        };
        let with = engine.map_or_else(String::new, |info| format!("\nwith {}", engine_line(info)));
        // Agents need a chat template.
        let agents = match chats {
            true => format!(
                "\n  # Agents (docs/clients.md), as Claude Code: \
                 ANTHROPIC_BASE_URL={base} ANTHROPIC_AUTH_TOKEN={key} claude --model {model}\n"
            ),
            false => String::new(),
        };
        let PasteLines { path, json, call, python, text } = if chats { CHAT } else { COMPLETION };
        write!(
            f,
            r#"
Baton serves {model} at {base}/v1{elsewhere}{with}

  curl -N {base}/v1/{path}{header} -d '{{"model":"{model}","stream":true,{json}}}'

  # Python, with: pip install openai
  from openai import OpenAI
  client = OpenAI(base_url="{base}/v1", api_key="{key}")
  for chunk in client.{call}.create(model="{model}", stream=True,
          {python}):
      print(chunk.choices[0].{text}, end="", flush=True)

  # Ollama's clients, with: export OLLAMA_HOST={ollama}
{agents}
{others}Stop with Ctrl-C.
Watch it in a browser: {base}/"#
        )
    }
}

/// An address a client on this machine can use: a wildcard becomes loopback.
fn reachable(address: SocketAddr) -> String {
    if address.ip().is_unspecified() {
        let loopback = if address.is_ipv4() { "127.0.0.1" } else { "[::1]" };
        format!("{loopback}:{}", address.port())
    } else {
        address.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn banner<'a>(address: &str, model: Option<&'a str>) -> Banner<'a> {
        let address = address.parse().unwrap();
        Banner { address, lan: None, ollama: None, model, others: &[], engine: None, needs_key: false, chats: true }
    }

    #[test]
    fn the_lines_name_the_address_the_model_and_the_key() {
        let lan = "192.168.1.5".parse().ok();
        let text = Banner { lan, needs_key: true, ..banner("0.0.0.0:8080", Some("M")) }.to_string();
        assert!(text.contains("http://127.0.0.1:8080/v1/chat/completions"), "{text}");
        assert!(text.contains("Bearer YOUR_KEY") && text.contains(r#""model":"M""#), "{text}");
        assert!(text.contains("From other machines: http://192.168.1.5:8080/v1"), "{text}");
        assert!(text.contains("OLLAMA_HOST=http://127.0.0.1:8080\n"), "{text}");
        let agents = "ANTHROPIC_BASE_URL=http://127.0.0.1:8080 ANTHROPIC_AUTH_TOKEN=YOUR_KEY claude --model M\n";
        assert!(text.contains(agents) && text.contains("docs/clients.md"), "{text}");
        assert!(text.ends_with("\nWatch it in a browser: http://127.0.0.1:8080/"), "the link is the last line: {text}");
        let others = ["A".to_owned(), "B".to_owned()];
        let text = Banner { others: &others, ..banner("127.0.0.1:1", Some("M")) }.to_string();
        assert!(text.contains("\nOther models: A, B\nStop with"), "{text}");
        let ollama = "127.0.0.1:11434".parse().ok();
        let text = Banner { ollama, ..banner("127.0.0.1:1", Some("M")) }.to_string();
        assert!(text.contains("OLLAMA_HOST=http://127.0.0.1:11434\n"), "{text}");
        assert!(!text.contains("Authorization") && !text.contains("other machines"), "{text}");
    }

    #[test]
    fn a_model_that_refuses_chats_is_shown_with_completions() {
        let text = Banner { chats: false, ..banner("127.0.0.1:1", Some("M")) }.to_string();
        assert!(
            text.contains("http://127.0.0.1:1/v1/completions -d '{") && text.contains("client.completions"),
            "{text}"
        );
        assert!(!text.contains("chat") && !text.contains("messages"), "{text}");
    }

    #[test]
    fn without_a_model_no_command_names_one() {
        let text = Banner { needs_key: true, ..banner("127.0.0.1:1", None) }.to_string();
        assert!(
            text.contains("curl http://127.0.0.1:1/v1/models -H 'Authorization: Bearer YOUR_KEY'\n")
                && !text.contains("\"model\""),
            "{text}"
        );
    }
}
