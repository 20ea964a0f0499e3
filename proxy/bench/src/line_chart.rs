//! Line charts, as SVG files.

use std::path::Path;

use baton_proxy::serve::CommandFailure;
use plotters::prelude::*;

/// Width and height in pixels.
const SIZE: (u32, u32) = (720, 420);

/// Lines over a common x axis.
pub(super) struct LineChart<'a> {
    pub(super) title: &'a str,
    pub(super) x_name: &'a str,
    pub(super) y_name: &'a str,
    /// Names of the positions 0, 1, … of the x axis, if they are not numbers.
    pub(super) ticks: Option<&'a [String]>,
    pub(super) lines: &'a [ChartLine],
}

/// A line of a chart.
pub(super) struct ChartLine {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

impl LineChart<'_> {
    /// Writes the chart to a file.
    pub(super) fn draw(&self, path: &Path) -> Result<(), CommandFailure> {
        let LineChart { title, x_name, y_name, ticks, lines } = *self;
        let failed = |error: &dyn std::fmt::Display| CommandFailure(format!("{}: {error}", path.display()));
        let points = || lines.iter().flat_map(|line| &line.points);
        let most = |axis: fn(&(f64, f64)) -> f64| points().map(axis).filter(|v| v.is_finite()).fold(0.0, f64::max);
        let x_range = ticks.map_or(0.0..1.05 * most(|p| p.0).max(1.0), |ticks| -0.2..ticks.len() as f64 - 0.8);
        let y_range = 0.0..1.15 * most(|p| p.1).max(0.1);
        let area = SVGBackend::new(path, SIZE).into_drawing_area();
        area.fill(&WHITE).map_err(|e| failed(&e))?;
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(64)
            .build_cartesian_2d(x_range, y_range)
            .map_err(|e| failed(&e))?;
        let tick = |x: &f64| match ticks {
            // Only whole positions have a name.
            Some(ticks) if (x - x.round()).abs() < 1e-6 => ticks.get(x.round() as usize).cloned().unwrap_or_default(),
            Some(_) => String::new(),
            None if (x - x.round()).abs() < 1e-6 => format!("{x:.0}"),
            None => format!("{x:.1}"),
        };
        let mesh = chart.configure_mesh().x_desc(x_name).y_desc(y_name).x_label_formatter(&tick).draw();
        mesh.map_err(|e| failed(&e))?;
        for (i, line) in lines.iter().enumerate() {
            let colour = Palette99::pick(i).mix(0.9);
            let drawn =
                chart.draw_series(LineSeries::new(line.points.iter().copied(), colour.stroke_width(2)).point_size(4));
            drawn
                .map_err(|e| failed(&e))?
                .label(&line.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        }
        let legend = chart.configure_series_labels().background_style(WHITE).border_style(BLACK.mix(0.3)).draw();
        legend.map_err(|e| failed(&e))?;
        area.present().map_err(|e| failed(&e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_has_its_title_its_lines_and_its_ticks() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.svg");
        let line = |name: &str| ChartLine { name: name.into(), points: vec![(0.0, 1.0), (1.0, 30.0)] };
        let ticks = ["slow link".to_owned(), "fast link".to_owned()];
        let lines = [line("first line"), line("second line")];
        let chart = LineChart { title: "A title", x_name: "x", y_name: "y", ticks: Some(&ticks), lines: &lines };
        chart.draw(&path).unwrap();
        let svg = std::fs::read_to_string(path).unwrap();
        for text in ["<svg", "A title", "first line", "second line", "slow link", "fast link", "polyline"] {
            assert!(svg.contains(text), "{text} is missing");
        }
    }
}
