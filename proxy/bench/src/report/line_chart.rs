//! Line charts, as SVG.

use std::error::Error;

use plotters::prelude::*;

/// Width and height in pixels.
const SIZE: (u32, u32) = (720, 420);

/// Lines over a common x axis.
pub(crate) struct LineChart<'a> {
    pub(crate) title: &'a str,
    pub(crate) x_name: &'a str,
    pub(crate) y_name: &'a str,
    /// Names of the positions 0, 1, … of the x axis, if they are not numbers.
    pub(crate) ticks: Option<&'a [String]>,
    pub(crate) lines: &'a [ChartLine],
}

/// A line of a chart.
pub(crate) struct ChartLine {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

impl LineChart<'_> {
    /// The chart as SVG.
    pub(super) fn svg(&self) -> Result<String, Box<dyn Error>> {
        let mut svg = String::new();
        self.draw(&mut svg)?;
        Ok(svg)
    }

    fn draw(&self, svg: &mut String) -> Result<(), Box<dyn Error>> {
        let LineChart { title, x_name, y_name, ticks, lines } = *self;
        let points = || lines.iter().flat_map(|line| &line.points);
        let most = |axis: fn(&(f64, f64)) -> f64| points().map(axis).filter(|v| v.is_finite()).fold(0.0, f64::max);
        let x_range = ticks.map_or(0.0..1.05 * most(|p| p.0).max(1.0), |ticks| -0.2..ticks.len() as f64 - 0.8);
        let y_range = 0.0..1.15 * most(|p| p.1).max(0.1);
        let area = SVGBackend::with_string(svg, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&area)
            .caption(title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(40)
            .y_label_area_size(64)
            .build_cartesian_2d(x_range, y_range)?;
        let tick = |x: &f64| match ticks {
            // Only whole positions have a name.
            Some(ticks) if (x - x.round()).abs() < 1e-6 => ticks.get(x.round() as usize).cloned().unwrap_or_default(),
            Some(_) => String::new(),
            None if (x - x.round()).abs() < 1e-6 => format!("{x:.0}"),
            None => format!("{x:.1}"),
        };
        chart.configure_mesh().x_desc(x_name).y_desc(y_name).x_label_formatter(&tick).draw()?;
        for (i, line) in lines.iter().enumerate() {
            let colour = Palette99::pick(i).mix(0.9);
            let series = LineSeries::new(line.points.iter().copied(), colour.stroke_width(2)).point_size(4);
            chart
                .draw_series(series)?
                .label(&line.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
        }
        chart.configure_series_labels().background_style(WHITE).border_style(BLACK.mix(0.3)).draw()?;
        Ok(area.present()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chart_has_its_title_its_lines_and_its_ticks() {
        let line = |name: &str| ChartLine { name: name.into(), points: vec![(0.0, 1.0), (1.0, 30.0)] };
        let ticks = ["slow link".to_owned(), "fast link".to_owned()];
        let lines = [line("first line"), line("second line")];
        let chart = LineChart { title: "A title", x_name: "x", y_name: "y", ticks: Some(&ticks), lines: &lines };
        let svg = chart.svg().unwrap();
        for text in ["<svg", "A title", "first line", "second line", "slow link", "fast link", "polyline"] {
            assert!(svg.contains(text), "{text} is missing");
        }
    }
}
