//! Where handing over pays, as a picture: one panel per pair of machines, prompt length by link rate.

use std::fmt::Write;

use super::grid::{GridCell, LINKS, PAIRS, PROMPTS};

/// Pixels.
const TILE: (usize, usize) = (62, 26);
const MARGIN: (usize, usize) = (70, 64);

/// Cells of new prompts with replies of this length are shown.
const OUTPUT: u32 = 256;

/// The chart as SVG. A tile says how many times sooner the first token comes with a handoff than without; a dot marks
/// what the planner handed over.
pub(super) fn break_even(cells: &[GridCell]) -> String {
    let panel = (MARGIN.0 + TILE.0 * PROMPTS.len() + 20, MARGIN.1 + TILE.1 * LINKS.len() + 30);
    let columns = 2;
    let (width, height) = (panel.0 * columns, panel.1 * PAIRS.len().div_ceil(columns) + 30);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
    );
    for (i, pair) in PAIRS.iter().enumerate() {
        let origin = ((i % columns) * panel.0 + MARGIN.0, (i / columns) * panel.1 + MARGIN.1);
        text(&mut svg, (origin.0, origin.1 - 34), "start", &format!("<tspan font-size=\"14\">{}</tspan>", pair.name));
        text(&mut svg, (origin.0 - 6, origin.1 - 10), "end", "Gb/s");
        for (column, n_prompt) in PROMPTS.iter().enumerate() {
            let x = origin.0 + column * TILE.0 + TILE.0 / 2;
            text(&mut svg, (x, origin.1 - 10), "middle", &n_prompt.to_string());
            for (row, gbps) in LINKS.iter().enumerate() {
                let y = origin.1 + row * TILE.1;
                if column == 0 {
                    text(&mut svg, (origin.0 - 6, y + 17), "end", &gbps.to_string());
                }
                let is_shown = |cell: &&GridCell| {
                    cell.pair == pair.name
                        && (cell.n_prompt, cell.n_output) == (*n_prompt, OUTPUT)
                        && cell.gbps == *gbps
                        && cell.cached == 0.0
                };
                if let Some(cell) = cells.iter().find(is_shown) {
                    tile(&mut svg, (x - TILE.0 / 2, y), cell);
                }
            }
        }
    }
    let legend = "Simulation. Prompt length (tokens) by link rate: how many times sooner the first token comes with a \
                  handoff than on the decode machine alone; ● the planner handed over.";
    text(&mut svg, (20, height - 12), "start", legend);
    svg.push_str("</svg>\n");
    svg
}

fn tile(svg: &mut String, (x, y): (usize, usize), cell: &GridCell) {
    let run = |handoff: bool| cell.fixed.iter().find(|run| run.decode == 0 && run.prefill.is_some() == handoff);
    let (Some(direct), Some(handoff)) = (run(false), run(true)) else { return };
    let times = direct.ttft / handoff.ttft;
    // Green where it pays, red where it does not, white at break-even; full colour at a factor of four.
    let strength = (times.log2().abs() / 2.0).min(1.0);
    let fade = |full: f64| (255.0 - strength * (255.0 - full)).round();
    let (r, g, b) =
        if times >= 1.0 { (fade(90.0), fade(185.0), fade(110.0)) } else { (fade(225.0), fade(120.0), fade(110.0)) };
    let (width, height) = (TILE.0 - 2, TILE.1 - 2);
    let dot = if cell.planned.prefill.is_some() { " ●" } else { "" };
    // Writing to a string does not fail.
    let _ =
        writeln!(svg, "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"rgb({r},{g},{b})\"/>");
    text(svg, (x + TILE.0 / 2, y + 16), "middle", &format!("{times:.2}{dot}"));
}

fn text(svg: &mut String, (x, y): (usize, usize), anchor: &str, words: &str) {
    let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{words}</text>");
}
