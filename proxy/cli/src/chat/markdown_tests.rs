//! What is shown for what models write, however it is cut.

use super::*;

/// Writes each style as a tag, so that expectations are readable.
fn tagged(pieces: Vec<Styled>) -> String {
    let mut joined: Vec<Styled> = Vec::new();
    for (style, text) in pieces {
        match joined.last_mut() {
            Some((last, shown)) if *last == style => shown.push_str(&text),
            _ => joined.push((style, text)),
        }
    }
    let tag = |style| match style {
        Style::Plain => "",
        Style::Bold => "B",
        Style::Italic => "I",
        Style::BoldItalic => "BI",
        Style::Code => "C",
        Style::Heading => "H",
        Style::Dim => "D",
    };
    let shown = joined.into_iter().map(|(style, text)| match tag(style) {
        "" => text,
        tag => format!("<{tag}>{text}</{tag}>"),
    });
    shown.collect()
}

fn check(text: &str, expected: &str) {
    let mut whole = Markdown::default();
    let mut pieces = whole.push(text);
    pieces.extend(whole.finish());
    assert_eq!(tagged(pieces), expected, "{text:?}");
    // Character by character.
    let mut cut = Markdown::default();
    let mut pieces: Vec<Styled> = text.chars().flat_map(|c| cut.push(c.encode_utf8(&mut [0; 4]))).collect();
    pieces.extend(cut.finish());
    assert_eq!(tagged(pieces), expected, "in pieces: {text:?}");
}

#[test]
fn emphasis_and_code_in_a_line() {
    check("a **bold** b", "a <B>bold</B> b");
    check("*it* and _it_", "<I>it</I> and <I>it</I>");
    check("***both***.", "<BI>both</BI>.");
    check("use `a*b` and ``x`y``!", "use <C>a*b</C> and <C>x`y</C>!");
    check("2*3*4 and snake_case_name", "2*3*4 and snake_case_name");
    check("5 * 3 ** 2", "5 * 3 ** 2");
    check("中文**粗体**中", "中文<B>粗体</B>中");
    check(r"\*no\* c:\dir", r"*no* c:\dir");
    check("**open\nnext", "<B>open</B>\nnext");
    check("**a *b* c**", "<B>a </B><BI>b</BI><B> c</B>");
}

#[test]
fn blocks_begin_at_a_line() {
    check("# Title\ntext", "<H>Title</H>\ntext");
    check("#tag", "#tag");
    check("- a\n* b\n  + c\n", "• a\n• b\n  • c\n");
    check("1. one\n2. two", "1. one\n2. two");
    check("> said\nnot", "<D>│ </D>said\nnot");
    check("---\n", "<D>────────────────────────</D>\n");
    check("-5 is **less**", "-5 is <B>less</B>");
    check("**Bold** first\n*it*", "<B>Bold</B> first\n<I>it</I>");
    check("a\n\nb", "a\n\nb");
    check("", "");
}

#[test]
fn code_blocks_are_shown_as_they_are() {
    check(
        "```rust\nlet a = *b; // _x_\n```\nafter *it*",
        "<D>```rust</D>\n<C>let a = *b; // _x_</C>\n<D>```</D>\nafter <I>it</I>",
    );
    check(
        "```\n# no heading\n- no item\n\n``` \nend",
        "<D>```</D>\n<C># no heading</C>\n<C>- no item</C>\n\n<D>``` </D>\nend",
    );
    check("~~~~\n```\n~~~~\nx", "<D>~~~~</D>\n<C>```</C>\n<D>~~~~</D>\nx");
    check("```\nnever closed", "<D>```</D>\n<C>never closed</C>");
}

#[test]
fn text_is_shown_as_it_comes() {
    let mut markdown = Markdown::default();
    assert_eq!(tagged(markdown.push("Hel")), "Hel");
    assert_eq!(tagged(markdown.push("lo *wor")), "lo <I>wor</I>");
    assert_eq!(tagged(markdown.push("ld*")), "<I>ld</I>");
    assert_eq!(tagged(markdown.push(" end")), " end");
}
