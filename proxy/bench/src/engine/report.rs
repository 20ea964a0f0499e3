//! All figures, and their report.

use baton_tryout::stats::{median, percentile};
use serde::Serialize;

use crate::report::{Better, Report, Unit, dash, one_decimal};

#[derive(Debug, Serialize)]
pub(super) struct EngineFigures {
    pub(super) rows: Vec<EngineRow>,
    /// `None`: not asked for.
    pub(super) memory: Option<EngineMemory>,
}

/// The figures of one load.
#[derive(Debug, Serialize)]
pub(super) struct EngineRow {
    pub(super) what: String,
    #[serde(flatten)]
    pub(super) rates: Option<Compared>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ttft_ms: Option<StepLatency>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) itl_ms: Option<StepLatency>,
    #[serde(skip)]
    pub(super) rounds: EngineRounds,
}

/// A row's values by round.
#[derive(Debug, Default)]
pub(super) struct EngineRounds {
    engine: Vec<f64>,
    ratios: Vec<f64>,
    /// Medians, milliseconds.
    ttft_p50: Vec<f64>,
    /// The 50th and 99th percentiles of the gaps, milliseconds.
    itl_p50: Vec<f64>,
    itl_p99: Vec<f64>,
}

/// Rates of the plain loop and of the engine: medians of the rounds, and of the ratios of pairs.
#[derive(Debug, Serialize)]
pub(super) struct Compared {
    unit: &'static str,
    plain: f64,
    engine: f64,
    ratio: f64,
}

/// Milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct StepLatency {
    pub(super) p50: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) p99: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) max: Option<f64>,
}

/// Memory of a node, MiB.
#[derive(Debug, Serialize)]
pub(super) struct EngineMemory {
    pub(super) model_mib: f64,
    pub(super) kv_mib: f64,
    pub(super) compute_mib: f64,
    /// `None`: the system does not report it.
    pub(super) resident_mib: Option<f64>,
    /// Resident beyond llama.cpp's buffers.
    pub(super) beyond_mib: Option<f64>,
}

impl EngineRow {
    pub(super) fn new(what: String) -> EngineRow {
        EngineRow { what, rates: None, ttft_ms: None, itl_ms: None, rounds: EngineRounds::default() }
    }

    /// With the tokens per second of each round.
    pub(super) fn compared(self, plain: &[f64], engine: &[f64]) -> EngineRow {
        let ratios: Vec<f64> = plain.iter().zip(engine).map(|(plain, engine)| engine / plain).collect();
        let rates = Compared { unit: "tok/s", plain: median(plain), engine: median(engine), ratio: median(&ratios) };
        let rounds = EngineRounds { engine: engine.to_vec(), ratios, ..self.rounds };
        EngineRow { rates: Some(rates), rounds, ..self }
    }

    fn add_figures(&self, report: &mut Report) {
        let EngineRounds { engine, ratios, ttft_p50, itl_p50, itl_p99 } = &self.rounds;
        let name = |figure: &str| format!("{}: {figure}", self.what);
        report.figure(name("engine"), Unit::TokensPerSecond, Better::More, engine);
        report.figure(name("engine ÷ plain loop"), Unit::Times, Better::More, ratios);
        report.figure(name("TTFT p50"), Unit::Milliseconds, Better::Less, ttft_p50);
        report.figure(name("ITL p50"), Unit::Milliseconds, Better::Less, itl_p50);
        report.figure(name("ITL p99"), Unit::Milliseconds, Better::Less, itl_p99);
    }
}

impl EngineRounds {
    /// Adds a round's times to first token and gaps, in milliseconds.
    pub(super) fn add(&mut self, ttft_ms: &[f64], gaps_ms: &[f64]) {
        self.ttft_p50.push(median(ttft_ms));
        self.itl_p50.push(percentile(gaps_ms, 50.0));
        self.itl_p99.push(percentile(gaps_ms, 99.0));
    }
}

impl StepLatency {
    pub(super) fn of(ms: &[f64]) -> StepLatency {
        StepLatency { p50: percentile(ms, 50.0), p99: Some(percentile(ms, 99.0)), max: None }
    }
}

impl EngineFigures {
    pub(super) fn report(&self, model: &str) -> Report {
        let mut report = Report::new(model);
        let head = ["", "plain", "engine", "ratio", "TTFT p50/99", "ITL p50", "ITL p99"];
        report.table(&head, self.rows.iter().map(EngineRow::cells));
        report.text("rates in tokens/s, latencies in ms; medians of rounds, ratios pair by pair");
        self.rows.iter().for_each(|row| row.add_figures(&mut report));
        if let Some(memory) = &self.memory {
            let EngineMemory { model_mib, kv_mib, compute_mib, .. } = memory;
            report.text(format!(
                "memory, MiB: model {model_mib:.1} + KV {kv_mib:.1} + compute {compute_mib:.1}; resident {}, beyond these {}",
                cell(memory.resident_mib),
                cell(memory.beyond_mib)
            ));
            let resident = [memory.resident_mib.unwrap_or(f64::NAN)];
            report.figure("resident memory of the node", Unit::Mebibytes, Better::Less, &resident);
        }
        report
    }
}

impl EngineRow {
    fn cells(&self) -> Vec<String> {
        let rates = self.rates.as_ref();
        let [ttft, itl] = [self.ttft_ms, self.itl_ms];
        let (p50, p99) = (|of: Option<StepLatency>| of.map(|of| of.p50), |of: Option<StepLatency>| of?.p99);
        vec![
            self.what.clone(),
            cell(rates.map(|rates| rates.plain)),
            cell(rates.map(|rates| rates.engine)),
            rates.map_or_else(dash, |rates| format!("{:.3}", rates.ratio)),
            format!("{}/{}", cell(p50(ttft)), cell(p99(ttft))),
            cell(p50(itl)),
            cell(p99(itl)),
        ]
    }
}

fn cell(value: Option<f64>) -> String {
    value.map_or_else(dash, one_decimal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_has_its_rates_or_its_latencies() {
        let prefill = EngineRow::new("prefill".into()).compared(&[100.0, 200.0, 300.0], &[110.0, 180.0, 300.0]);
        let gaps = StepLatency { max: Some(9.0), ..StepLatency::of(&[1.0, 2.0, 3.0]) };
        let joining = EngineRow { itl_ms: Some(gaps), ..EngineRow::new("joining".into()) };
        let memory =
            EngineMemory { model_mib: 1.0, kv_mib: 2.0, compute_mib: 3.0, resident_mib: None, beyond_mib: None };
        let figures = EngineFigures { rows: vec![prefill, joining], memory: Some(memory) };
        let json = serde_json::to_value(&figures).unwrap();
        assert_eq!((&json["rows"][0]["ratio"], &json["rows"][0]["itl_ms"]), (&1.0.into(), &serde_json::Value::Null));
        assert_eq!(
            (&json["rows"][1]["itl_ms"]["max"], &json["rows"][1]["plain"]),
            (&9.0.into(), &serde_json::Value::Null)
        );
        let text = figures.report("smollm2").to_text();
        let cells = |line: usize| text.lines().nth(line).unwrap().split_whitespace().collect::<Vec<_>>();
        assert_eq!(cells(1), ["prefill", "200.0", "180.0", "1.000", "–/–", "–", "–"]);
        assert_eq!(cells(2), ["joining", "–", "–", "–", "–/–", "2.0", "3.0"]);
        let recorded = figures.report("smollm2").recorded();
        assert_eq!(recorded[1], ("prefill: engine ÷ plain loop".into(), vec![1.1, 0.9, 1.0]));
        assert_eq!(recorded.len(), 2, "memory and gaps of no round were not measured: {recorded:?}");
        assert!(text.ends_with("KV 2.0 + compute 3.0; resident –, beyond these –\n"), "{text}");
    }
}
