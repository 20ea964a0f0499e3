//! What a person sees when the server is up: lines to paste.

use std::net::{IpAddr, SocketAddr};

/// The ready message for a server at `address`, which other machines reach at `lan`, and Ollama's clients at `ollama`.
pub(super) fn banner(
    address: SocketAddr,
    lan: Option<IpAddr>,
    ollama: Option<SocketAddr>,
    model: &str,
    needs_key: bool,
) -> String {
    let base = format!("http://{}", reachable(address));
    let elsewhere = lan.map_or_else(String::new, |lan| {
        format!("\nFrom other machines: http://{}/v1", SocketAddr::new(lan, address.port()))
    });
    let ollama = ollama.map_or_else(|| base.clone(), |address| format!("http://{}", reachable(address)));
    let (key, header) = match needs_key {
        true => ("YOUR_KEY", " -H 'Authorization: Bearer YOUR_KEY'"),
        false => ("none", ""),
    };
    format!(
        r#"
Baton serves {model} at {base}/v1{elsewhere}

  curl -N {base}/v1/chat/completions{header} -d '{{"model":"{model}","stream":true,"messages":[{{"role":"user","content":"Why is the sky blue?"}}]}}'

  # Python, with: pip install openai
  from openai import OpenAI
  client = OpenAI(base_url="{base}/v1", api_key="{key}")
  for chunk in client.chat.completions.create(model="{model}", stream=True,
          messages=[{{"role": "user", "content": "Why is the sky blue?"}}]):
      print(chunk.choices[0].delta.content or "", end="", flush=True)

  # Ollama's clients, with: export OLLAMA_HOST={ollama}

Stop with Ctrl-C."#
    )
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

    #[test]
    fn the_lines_name_the_address_the_model_and_the_key() {
        let text = banner("0.0.0.0:8080".parse().unwrap(), "192.168.1.5".parse().ok(), None, "M", true);
        assert!(text.contains("http://127.0.0.1:8080/v1/chat/completions"), "{text}");
        assert!(text.contains("Bearer YOUR_KEY") && text.contains(r#""model":"M""#), "{text}");
        assert!(text.contains("From other machines: http://192.168.1.5:8080/v1"), "{text}");
        assert!(text.contains("OLLAMA_HOST=http://127.0.0.1:8080\n"), "{text}");
        let text = banner("127.0.0.1:1".parse().unwrap(), None, "127.0.0.1:11434".parse().ok(), "M", false);
        assert!(text.contains("OLLAMA_HOST=http://127.0.0.1:11434\n"), "{text}");
        assert!(!text.contains("Authorization") && !text.contains("other machines"), "{text}");
    }
}
