//! Writes a machine's figures into a page, between two lines that mark the place. Figures of other machines stay.

/// Before the figures of all machines.
const BEGIN: &str = "<!-- written by `baton-bench backends`: begin -->\n";

/// After them.
const END: &str = "<!-- end -->";

/// The start of a machine's figures.
const HEADING: &str = "### ";

/// The page with the figures of one machine, whose heading is `title`. `None`: the page has no such place.
pub(super) fn with_figures(page: &str, title: &str, figures: &str) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (old, after) = rest.split_once(END)?;
    let mut out = format!("{before}{BEGIN}");
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

    #[test]
    fn a_machine_replaces_its_own_figures_only() {
        let page = format!("# Page\n\n{BEGIN}{END}\n\nrest <!-- end -->\n");
        let first = with_figures(&page, "GB10", "| old |\n").unwrap();
        let second = with_figures(&first, "EPYC", "| epyc |").unwrap();
        let third = with_figures(&second, "GB10", "| new |").unwrap();
        assert_eq!(
            third,
            format!("# Page\n\n{BEGIN}\n### EPYC\n\n| epyc |\n\n### GB10\n\n| new |\n\n{END}\n\nrest <!-- end -->\n")
        );
        assert_eq!(with_figures(&third, "GB10", "| new |").unwrap(), third, "a second run changes nothing");
    }

    #[test]
    fn a_page_without_the_place_is_refused() {
        assert_eq!(with_figures("# Page", "GB10", ""), None);
        assert_eq!(with_figures(&format!("# Page\n{BEGIN}"), "GB10", ""), None);
    }
}
