//! Writes a run's figures into a page, between two lines that mark the place of its benchmark. Runs under other headings, such
//! as other machines, stay.

/// The line before the sections of a benchmark.
fn begin(bench: &str) -> String {
    format!("<!-- written by `baton-bench {bench}`: begin -->\n")
}

/// After them.
const END: &str = "<!-- end -->";

/// The start of a section.
const HEADING: &str = "### ";

/// The page with the section of one run, whose heading is `title`. `None`: the page has no place for this benchmark.
pub(super) fn with_section(page: &str, bench: &str, title: &str, figures: &str) -> Option<String> {
    let begin = begin(bench);
    let (before, rest) = page.split_once(&begin)?;
    let (old, after) = rest.split_once(END)?;
    let mut out = format!("{before}{begin}");
    let others = sections(old).filter(|section| section.lines().next() != Some(title));
    let new = format!("{title}\n\n{}\n", figures.trim_end());
    for section in others.map(str::to_owned).chain([new]) {
        out += &format!("\n{HEADING}{}\n", section.trim_end());
    }
    Some(format!("{out}\n{END}{after}"))
}

/// The sections of a text, without the mark of their headings.
fn sections(text: &str) -> impl Iterator<Item = &str> {
    text.split(&format!("\n{HEADING}")).skip(1).collect::<Vec<_>>().into_iter()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(page: &str, title: &str, figures: &str) -> Option<String> {
        with_section(page, "plan", title, figures)
    }

    #[test]
    fn a_run_replaces_its_own_section_only() {
        let begin = begin("plan");
        let page = format!("# Page\n\n{begin}{END}\n\nrest <!-- end -->\n");
        let first = with(&page, "GB10", "| old |\n").unwrap();
        let second = with(&first, "EPYC", "| epyc |").unwrap();
        let third = with(&second, "GB10", "| new |").unwrap();
        assert_eq!(
            third,
            format!("# Page\n\n{begin}\n### EPYC\n\n| epyc |\n\n### GB10\n\n| new |\n\n{END}\n\nrest <!-- end -->\n")
        );
        assert_eq!(with(&third, "GB10", "| new |").unwrap(), third, "a second run changes nothing");
    }

    #[test]
    fn a_page_without_the_place_is_refused() {
        assert_eq!(with("# Page", "GB10", ""), None);
        assert_eq!(with(&format!("# Page\n{}", begin("plan")), "GB10", ""), None);
        assert_eq!(with(&format!("# Page\n{}{END}", begin("engine")), "GB10", ""), None, "another benchmark's");
    }
}
