//! Renders a template for another process: the messages between both, over any stream of bytes.
//!
//! A template is a program of whoever made the model's file, and much of what it can say makes much of little: `a ~ a` in a loop,
//! `replace`, `join`, `indent(30000000000)`. Steps and output are limited, but a single step has no limit on its memory, and each filter
//! would need its own. So the engine renders in a process with a limit for the whole: [`serve`] runs there
//! (`proxy/node/src/render.rs`), [`RemoteTemplate`] is its caller (`engines/src/serving/template_process.rs`).
//!
//! ```text
//! caller                                   renderer
//! length u32 | JSON: TemplateSource  ───►
//!                                    ◄───  answer: no pieces, or an error
//! length u32 | JSON: RenderCall      ───►
//!                                    ◄───  answer, and so on, until the caller closes
//!
//! answer   kind u8 | number of pieces u32 | each: has_control u8 | length u32 | UTF-8          little-endian
//! kind     0: pieces; with the text as the one piece: 1 rejected, 2 too long, 3 failed
//! ```

use std::borrow::Cow;
use std::io::{self, Read, Write};
use std::time::{Duration, SystemTime};

use baton_schemas::generate::Conversation;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{ChatTemplate, MAX_OUTPUT_BYTES, SpecialTokens, TemplateError, TemplatePiece};

/// The longest message of a caller. A conversation is at most some ten megabytes, which escapes make longer.
const MAX_CALL_BYTES: usize = 512 << 20;

/// The most pieces of a prompt. There are two for each control token that a conversation spells.
const MAX_PIECES: u32 = 1 << 20;

/// What a renderer compiles.
#[derive(Serialize, Deserialize)]
struct TemplateSource<'a> {
    source: Cow<'a, str>,
    special: Cow<'a, SpecialTokens>,
}

/// A conversation to render, without its images.
#[derive(Serialize, Deserialize)]
struct RenderCall<'a> {
    conversation: Cow<'a, Conversation>,
    since_epoch: Duration,
    max_bytes: usize,
}

/// Answers one caller until it closes the stream. `begin` is called before each message is read. Errors: the stream's, or `begin`'s.
pub fn serve(mut stream: impl Read + Write, mut begin: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    begin()?;
    let Some(TemplateSource { source, special }) = read_message(&mut stream)? else { return Ok(()) };
    let template = match ChatTemplate::compile(&source, special.into_owned()) {
        Ok(template) => template,
        Err(error) => return write_answer(&mut stream, &Err(error)),
    };
    write_answer(&mut stream, &Ok(Vec::new()))?;
    loop {
        begin()?;
        let Some(RenderCall { conversation, since_epoch, max_bytes }) = read_message(&mut stream)? else {
            return Ok(());
        };
        let now = SystemTime::UNIX_EPOCH + since_epoch;
        write_answer(&mut stream, &template.render_pieces(&conversation, now, max_bytes))?;
    }
}

/// A template behind a stream.
pub struct RemoteTemplate<S>(S);

impl<S: Read + Write> RemoteTemplate<S> {
    /// Has the other end compile a template. Errors: the stream's, or those of [`ChatTemplate::compile`].
    pub fn open(mut stream: S, source: &str, special: &SpecialTokens) -> io::Result<Result<Self, TemplateError>> {
        let message = TemplateSource { source: Cow::Borrowed(source), special: Cow::Borrowed(special) };
        write_message(&mut stream, &message)?;
        Ok(read_answer(&mut stream)?.map(|_| RemoteTemplate(stream)))
    }

    /// Has it render a conversation as [`ChatTemplate::render_pieces`] does. After an error of the stream it cannot be used again.
    pub fn render_pieces(
        &mut self,
        conversation: &Conversation,
        now: SystemTime,
        max_bytes: usize,
    ) -> io::Result<Result<Vec<TemplatePiece>, TemplateError>> {
        let since_epoch = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        write_message(&mut self.0, &RenderCall { conversation: Cow::Borrowed(conversation), since_epoch, max_bytes })?;
        read_answer(&mut self.0)
    }
}

fn write_message(stream: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    let length = u32::try_from(text.len()).ok().filter(|_| text.len() <= MAX_CALL_BYTES);
    stream.write_all(&length.ok_or_else(|| malformed("a conversation that is too long"))?.to_le_bytes())?;
    stream.write_all(&text)
}

/// `None`: the caller has closed the stream.
fn read_message<T: DeserializeOwned>(stream: &mut impl Read) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match stream.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_CALL_BYTES {
        return Err(malformed("a call that is too long"));
    }
    let mut text = vec![0; length];
    stream.read_exact(&mut text)?;
    Ok(Some(serde_json::from_slice(&text)?))
}

fn write_answer(stream: &mut impl Write, answer: &Result<Vec<TemplatePiece>, TemplateError>) -> io::Result<()> {
    let of_error = |text: &str| vec![TemplatePiece { text: text.to_owned(), has_control: false }];
    let (kind, pieces): (u8, Cow<'_, [TemplatePiece]>) = match answer {
        Ok(pieces) => (0, Cow::Borrowed(pieces)),
        Err(TemplateError::Rejected(message)) => (1, Cow::Owned(of_error(message))),
        Err(TemplateError::TooLong { prompt }) => (2, Cow::Owned(of_error(prompt))),
        Err(TemplateError::Failed(message) | TemplateError::Unavailable(message)) => (3, Cow::Owned(of_error(message))),
    };
    // Sent as a whole: single pieces would be as many system calls.
    let mut bytes = Vec::with_capacity(5 + pieces.iter().map(|piece| 5 + piece.text.len()).sum::<usize>());
    bytes.push(kind);
    bytes.extend((pieces.len() as u32).to_le_bytes());
    for TemplatePiece { text, has_control } in pieces.iter() {
        bytes.push(u8::from(*has_control));
        bytes.extend((text.len() as u32).to_le_bytes());
        bytes.extend(text.as_bytes());
    }
    stream.write_all(&bytes)
}

fn read_answer(stream: &mut impl Read) -> io::Result<Result<Vec<TemplatePiece>, TemplateError>> {
    let mut stream = io::BufReader::new(stream);
    let [kind] = read_array(&mut stream)?;
    let n_pieces = u32::from_le_bytes(read_array(&mut stream)?);
    if n_pieces > MAX_PIECES {
        return Err(malformed("too many pieces"));
    }
    let mut left = MAX_OUTPUT_BYTES;
    let mut pieces = Vec::new();
    for _ in 0..n_pieces {
        let [has_control] = read_array(&mut stream)?;
        let length = u32::from_le_bytes(read_array(&mut stream)?) as usize;
        left = left.checked_sub(length).ok_or_else(|| malformed("a prompt that is too long"))?;
        let mut text = vec![0; length];
        stream.read_exact(&mut text)?;
        let text = String::from_utf8(text).map_err(|_| malformed("a text that is not UTF-8"))?;
        pieces.push(TemplatePiece { text, has_control: has_control != 0 });
    }
    let mut text = || pieces.pop().map(|piece| piece.text).unwrap_or_default();
    match kind {
        0 => Ok(Ok(pieces)),
        1 => Ok(Err(TemplateError::Rejected(text()))),
        2 => Ok(Err(TemplateError::TooLong { prompt: text() })),
        3 => Ok(Err(TemplateError::Failed(text()))),
        _ => Err(malformed("an answer of an unknown kind")),
    }
}

fn read_array<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn malformed(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use serde_json::json;

    use super::*;

    const TEMPLATE: &str = "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}{% for m in messages %}<s>{{ m.content }}{{ tools | tojson }}{% endfor %}{{ strftime_now('%Y') }}";

    #[test]
    fn another_end_answers_as_the_template_itself() {
        let special =
            SpecialTokens { bos: "<s>".into(), eos: "</s>".into(), control: vec!["<s>".into(), "</s>".into()] };
        let here = ChatTemplate::compile(TEMPLATE, special.clone()).unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        let serving = std::thread::spawn(move || serve(far, || Ok(())));
        let mut there = RemoteTemplate::open(near, TEMPLATE, &special).unwrap().unwrap();
        let now = SystemTime::UNIX_EPOCH + Duration::new(1_700_000_000, 5);
        for text in ["a <s> b </s>", "no", "", "\u{0}é\u{E000}", &"x".repeat(2_000)] {
            let conversation: Conversation = serde_json::from_value(json!({
                "messages": [{ "role": "user", "content": text }],
                "tools": [{ "z": 1e-7, "a": [9_007_199_254_740_993_u64, null] }],
            }))
            .unwrap();
            let rendered = there.render_pieces(&conversation, now, 1_000).unwrap();
            assert_eq!(rendered, here.render_pieces(&conversation, now, 1_000), "{text}");
        }
        drop(there);
        serving.join().unwrap().unwrap();
    }

    #[test]
    fn a_template_that_does_not_compile_is_refused_by_the_other_end() {
        let (near, far) = UnixStream::pair().unwrap();
        let serving = std::thread::spawn(move || serve(far, || Ok(())));
        let refused = RemoteTemplate::open(near, "{% if %}", &SpecialTokens::default()).unwrap().err().unwrap();
        assert_eq!(Some(refused), ChatTemplate::compile("{% if %}", SpecialTokens::default()).err());
        serving.join().unwrap().unwrap();
    }

    #[test]
    fn lengths_of_the_other_end_are_checked_before_anything_is_allocated() {
        let huge = u32::MAX.to_le_bytes();
        let read = |bytes: &[u8]| read_answer(&mut &*bytes).map_err(|error| error.kind());
        assert_eq!(read(&[&[0], &huge[..]].concat()), Err(io::ErrorKind::InvalidData));
        assert_eq!(read(&[&[0, 1, 0, 0, 0, 1], &huge[..]].concat()), Err(io::ErrorKind::InvalidData));
        assert_eq!(read(&[9, 0, 0, 0, 0]), Err(io::ErrorKind::InvalidData));
        assert_eq!(read(&[0, 2, 0, 0, 0, 1]), Err(io::ErrorKind::UnexpectedEof));
        assert!(
            matches!(read_message::<RenderCall<'_>>(&mut &huge[..]), Err(error) if error.kind() == io::ErrorKind::InvalidData)
        );
    }
}
