//! A chart of where handoffs pay: one panel per pair of machines, prompt length by link rate.

use std::fmt::Write;

use baton_planner::reason::RouteKind;

use super::grid::{GridCell, LINKS, PAIRS, PROMPTS};

/// The sizes of a tile and of a panel's margins, in pixels.
const TILE_WIDTH: usize = 62;
const TILE_HEIGHT: usize = 26;
const MARGIN_LEFT: usize = 70;
const MARGIN_TOP: usize = 64;

/// Only requests with replies of this length and without a cached prefix are shown.
const OUTPUT: u32 = 256;

/// A place in the chart, in pixels.
#[derive(Clone, Copy)]
struct Point {
    x: usize,
    y: usize,
}

/// Draws the chart as SVG. A tile shows how many times sooner the first token comes with a handoff than without; a dot
/// marks the requests that the planner handed over.
pub(super) fn break_even(cells: &[GridCell]) -> String {
    let panel_width = MARGIN_LEFT + TILE_WIDTH * PROMPTS.len() + 20;
    let panel_height = MARGIN_TOP + TILE_HEIGHT * LINKS.len() + 30;
    let columns = 2;
    let width = panel_width * columns;
    let height = panel_height * PAIRS.len().div_ceil(columns) + 30;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
    );
    for (i, pair) in PAIRS.iter().enumerate() {
        let left = (i % columns) * panel_width + MARGIN_LEFT;
        let top = (i / columns) * panel_height + MARGIN_TOP;
        let name = format!("<tspan font-size=\"14\">{}</tspan>", pair.name);
        text(&mut svg, Point { x: left, y: top - 34 }, "start", &name);
        text(&mut svg, Point { x: left - 6, y: top - 10 }, "end", "Gb/s");
        for (row, gbps) in LINKS.iter().enumerate() {
            text(&mut svg, Point { x: left - 6, y: top + row * TILE_HEIGHT + 17 }, "end", &gbps.to_string());
        }
        for (column, n_prompt) in PROMPTS.iter().enumerate() {
            let x = left + column * TILE_WIDTH;
            text(&mut svg, Point { x: x + TILE_WIDTH / 2, y: top - 10 }, "middle", &n_prompt.to_string());
            for (row, gbps) in LINKS.iter().enumerate() {
                let is_shown = |cell: &&GridCell| {
                    let is_request = cell.n_prompt == *n_prompt && cell.n_output == OUTPUT && cell.cached == 0.0;
                    is_request && cell.pair == pair.name && cell.gbps == *gbps
                };
                if let Some(cell) = cells.iter().find(is_shown) {
                    tile(&mut svg, Point { x, y: top + row * TILE_HEIGHT }, cell);
                }
            }
        }
    }
    let legend = "Simulation. Prompt length (tokens) by link rate: how many times sooner the first token comes with a \
                  handoff than on the decode machine alone; ● the planner handed over.";
    text(&mut svg, Point { x: 20, y: height - 12 }, "start", legend);
    svg.push_str("</svg>\n");
    svg
}

fn tile(svg: &mut String, Point { x, y }: Point, cell: &GridCell) {
    let run = |kind: RouteKind| cell.fixed.iter().find(|run| run.decode == 0 && run.kind() == kind);
    let (Some(direct), Some(handoff)) = (run(RouteKind::Direct), run(RouteKind::Handoff)) else { return };
    let times = direct.ttft / handoff.ttft;
    // Green where a handoff pays, red where it does not, white at break-even; full colour at a factor of four.
    let strength = (times.log2().abs() / 2.0).min(1.0);
    let full_colour = if times >= 1.0 { [90.0, 185.0, 110.0] } else { [225.0, 120.0, 110.0] };
    let [r, g, b] = full_colour.map(|full: f64| (255.0 - strength * (255.0 - full)).round());
    let width = TILE_WIDTH - 2;
    let height = TILE_HEIGHT - 2;
    let dot = if cell.planned.prefill.is_some() { " ●" } else { "" };
    // Writing to a string does not fail.
    let _ =
        writeln!(svg, "<rect x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\" fill=\"rgb({r},{g},{b})\"/>");
    text(svg, Point { x: x + TILE_WIDTH / 2, y: y + 16 }, "middle", &format!("{times:.2}{dot}"));
}

fn text(svg: &mut String, Point { x, y }: Point, anchor: &str, words: &str) {
    let _ = writeln!(svg, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\">{words}</text>");
}
