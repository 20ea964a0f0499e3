//! All figures, and their report.

use baton_tryout::examination::{DeviceSpeed, Examined, HandoffCheck, Machine, Verdict};
use serde::Serialize;

use super::args::TrialSizes;
use crate::report::{Report, Row, dash, one_decimal};

/// The figures of all models on one machine.
#[derive(Debug, Serialize)]
pub(super) struct BackendsFigures {
    /// The day of the run, UTC.
    pub(super) date: String,
    #[serde(flatten)]
    pub(super) machine: Machine,
    /// The version of NVIDIA's driver, if there is a GPU and the version can be read.
    pub(super) driver: Option<String>,
    /// Compute threads of each node.
    pub(super) threads: u32,
    #[serde(flatten)]
    pub(super) sizes: TrialSizes,
    pub(super) models: Vec<ModelFigures>,
}

/// The figures with one model.
#[derive(Debug, Serialize)]
pub(super) struct ModelFigures {
    pub(super) name: String,
    /// What the weights are, unless the name says it.
    pub(super) about: Option<&'static str>,
    /// The size of its file.
    pub(super) file_bytes: u64,
    /// Why nothing was measured.
    pub(super) failure: Option<String>,
    #[serde(flatten)]
    pub(super) examined: Examined,
}

const ALONE: [&str; 5] = ["model", "device", "prefill tok/s", "decode tok/s", "TTFT ms"];

const HANDOFFS: [&str; 15] = [
    "model",
    "handoff",
    "verdict",
    "KV distance",
    "mean KL",
    "same token",
    "prefill tok/s",
    "MB",
    "export GB/s",
    "import GB/s",
    "hidden",
    "tail ms",
    "TTFT ms",
    "÷ alone on decode",
    "÷ alone on prefill",
];

impl BackendsFigures {
    /// Number of failed checks and models.
    fn n_failed(&self) -> usize {
        self.models.iter().map(|model| usize::from(model.failure.is_some()) + model.examined.n_failed()).sum()
    }

    /// The heading of this machine's figures: its GPUs, or its processor.
    fn title(&self) -> String {
        let gpus: Vec<&str> = self.machine.gpus().map(|gpu| gpu.description.as_str()).collect();
        match gpus.is_empty() {
            true => format!("{}, without a GPU", self.processor()),
            false => gpus.join(", "),
        }
    }

    /// The reasons of failures are for this terminal alone: they may name paths.
    pub(super) fn report(&self) -> Report {
        let mut report = Report::new(self.title());
        report.text(self.about());
        report.table(&ALONE, self.alone());
        report.table(&HANDOFFS, self.handoffs());
        let failures = self.failures().into_iter().map(|(what, why)| format!("{what} FAILED: {why}\n"));
        report.local(failures.collect::<String>());
        report.fail(match self.n_failed() {
            0 => None,
            n => Some(format!("{n} of the measurements failed")),
        });
        report
    }

    /// When, where and how it was measured, in a line.
    fn about(&self) -> String {
        let BackendsFigures { date, machine, threads, sizes, .. } = self;
        let TrialSizes { n_tokens, n_new, n_rounds } = sizes;
        let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
        let gpus =
            machine.gpus().map(|gpu| format!("{} {} ({:.1} GiB), ", gpu.name, gpu.description, gib(gpu.memory_bytes)));
        let driver = self.driver.as_ref().map(|version| format!("driver {version}, ")).unwrap_or_default();
        let of_models = self.models.iter().filter_map(|model| Some(format!("; {}: {}", model.name, model.about?)));
        format!(
            "{date}, baton {} on {}, built for {}: {}{driver}cpu {}, {threads} thread(s) a node. Prompts of {n_tokens} tokens, \
             {n_new} new ones, medians of {n_rounds} round(s){}.",
            machine.version,
            machine.system,
            machine.built_for(),
            gpus.collect::<String>(),
            self.processor(),
            of_models.collect::<String>(),
        )
    }

    fn processor(&self) -> &str {
        self.machine.devices.first().map_or("processor", |device| &device.description)
    }

    fn alone(&self) -> Vec<Row> {
        let row = |model: &ModelFigures, speed: &DeviceSpeed| {
            let figures = match speed.failure {
                None => [
                    format!("{:.0}", speed.prefill_tps),
                    one_decimal(speed.decode_tps),
                    format!("{:.0}", speed.ttft_ms),
                ],
                Some(_) => ["failed".to_owned(), dash(), dash()],
            };
            [model.name.clone(), speed.device.clone()].into_iter().chain(figures).collect()
        };
        self.models.iter().flat_map(|m| m.examined.speeds.iter().map(move |speed| row(m, speed))).collect()
    }

    fn handoffs(&self) -> Vec<Row> {
        self.models.iter().flat_map(|m| m.examined.handoffs.iter().map(|check| handoff(m, check))).collect()
    }

    /// Each failure with its cause.
    fn failures(&self) -> Vec<(String, &str)> {
        let mut failures = Vec::new();
        for model in &self.models {
            let name = &model.name;
            failures.extend(model.failure.iter().map(|why| (name.clone(), why.as_str())));
            let speeds = model.examined.speeds.iter();
            failures.extend(speeds.filter_map(|s| Some((format!("{name} on {}", s.device), s.failure.as_deref()?))));
            failures.extend(model.examined.handoffs.iter().filter_map(|check| match &check.verdict {
                Verdict::Failed(why) => Some((format!("{name}, {}", pair(check)), why.as_str())),
                Verdict::Exact | Verdict::Close => None,
            }));
        }
        failures
    }
}

fn pair(check: &HandoffCheck) -> String {
    format!("{} → {}", check.from, check.to)
}

fn handoff(model: &ModelFigures, check: &HandoffCheck) -> Row {
    let verdict = match check.verdict {
        Verdict::Exact => "exact",
        Verdict::Close => "close",
        Verdict::Failed(_) => "failed",
    };
    let mut row = vec![model.name.clone(), pair(check), verdict.to_owned()];
    if check.n_compared == 0 {
        // It failed before anything was measured.
        row.resize_with(HANDOFFS.len(), dash);
        return row;
    }
    let ratio = |device: &str| {
        model.examined.speed(device).map_or_else(dash, |alone| format!("{:.2}", check.ttft_ms / alone.ttft_ms))
    };
    let rate = |rate: Option<f64>| rate.map_or_else(dash, |rate| format!("{rate:.2}"));
    row.extend([
        check.kv_distance.map_or_else(dash, |distance| format!("{distance:.1e}")),
        format!("{:.1e}", check.mean_kl),
        format!("{}/{}", check.n_agreed, check.n_compared),
        format!("{:.0}", check.prefill_tps),
        one_decimal(check.n_bytes as f64 / 1e6),
        rate(check.export_gb_s),
        rate(check.import_gb_s),
        check.hidden_share.map_or_else(dash, |share| format!("{:.0} %", 100.0 * share)),
        one_decimal(check.after_prefill_ms),
        format!("{:.0}", check.ttft_ms),
        ratio(&check.to),
        ratio(&check.from),
    ]);
    row
}

#[cfg(test)]
mod tests {
    use baton_tryout::examination::Listed;

    use super::*;

    fn device(name: &str, description: &str) -> Listed {
        Listed { name: name.into(), description: description.into(), memory_bytes: 16 << 30 }
    }

    fn check(from: &str, to: &str, verdict: Verdict) -> HandoffCheck {
        HandoffCheck {
            from: from.into(),
            to: to.into(),
            n_bytes: 11_500_000,
            kv_distance: Some(0.012),
            mean_kl: 0.0015,
            n_agreed: 32,
            n_compared: 32,
            prefill_ms: 50.0,
            after_prefill_ms: 2.5,
            prefill_tps: 10_220.0,
            export_gb_s: Some(1.25),
            import_gb_s: None,
            hidden_share: Some(0.875),
            ttft_ms: 60.0,
            kv_losses: Vec::new(),
            verdict,
            ..HandoffCheck::default()
        }
    }

    fn backends() -> BackendsFigures {
        let speed = |device: &str, ttft_ms| DeviceSpeed {
            device: device.into(),
            prefill_tps: 512.0 / ttft_ms * 1e3,
            decode_tps: 60.0,
            ttft_ms,
            checkpoint: None,
            restores: Vec::new(),
            failure: None,
            drafters: Vec::new(),
        };
        let handoffs = vec![
            check("CUDA0", "cpu", Verdict::Close),
            HandoffCheck {
                from: "CUDA0".into(),
                to: "CUDA0".into(),
                verdict: Verdict::Failed("out of memory".into()),
                ..HandoffCheck::default()
            },
        ];
        let mut machine = Machine::with(&[]);
        machine.backends = vec!["cuda"];
        machine.missing = None;
        machine.devices = vec![device("cpu", "EPYC"), device("CUDA0", "NVIDIA GB10")];
        BackendsFigures {
            date: "2026-11-25".into(),
            machine,
            driver: Some("580.95.05".into()),
            threads: 8,
            sizes: TrialSizes { n_tokens: 512, n_new: 32, n_rounds: 3 },
            models: vec![
                ModelFigures {
                    name: "dense-8b".into(),
                    about: Some("made up"),
                    file_bytes: 4_700_000_000,
                    failure: None,
                    examined: Examined { speeds: vec![speed("cpu", 600.0), speed("CUDA0", 40.0)], handoffs },
                },
                ModelFigures {
                    name: "moe-30b-a3b".into(),
                    about: None,
                    file_bytes: 0,
                    failure: Some("not enough free disk space in /secret".into()),
                    examined: Examined::default(),
                },
            ],
        }
    }

    #[test]
    fn the_table_has_every_figure_and_every_failure() {
        let figures = backends();
        let text = figures.report().to_text();
        let row = text.lines().find(|line| line.contains("CUDA0 → cpu")).unwrap();
        let cells: Vec<&str> = row.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect();
        let expected = [
            "dense-8b",
            "CUDA0 → cpu",
            "close",
            "1.2e-2",
            "1.5e-3",
            "32/32",
            "10220",
            "11.5",
            "1.25",
            "–",
            "88 %",
            "2.5",
            "60",
            "0.10",
            "1.50",
        ];
        assert_eq!(cells, expected);
        assert!(text.contains("dense-8b, CUDA0 → CUDA0 FAILED: out of memory"), "{text}");
        assert!(text.contains("moe-30b-a3b FAILED: not enough free disk space"), "{text}");
        assert!(text.contains("NVIDIA GB10 (16.0 GiB), driver 580.95.05, cpu EPYC, 8 thread(s) a node"), "{text}");
        assert_eq!(figures.n_failed(), 2);
    }

    #[test]
    fn the_page_has_the_card_but_no_reasons() {
        let figures = backends();
        let page = figures.report().to_markdown();
        assert_eq!(figures.title(), "NVIDIA GB10");
        assert!(page.contains("| dense-8b | CUDA0 → cpu | close | 1.2e-2 |"), "{page}");
        assert!(page.contains("| dense-8b | CUDA0 → CUDA0 | failed | – |"), "{page}");
        assert!(!page.contains("/secret") && !page.contains("out of memory"), "{page}");
    }

    #[test]
    fn json_has_machine_and_models_side_by_side() {
        let json = serde_json::to_value(backends()).unwrap();
        assert_eq!(json["driver"], "580.95.05");
        assert_eq!(json["n_rounds"], 3);
        assert_eq!(json["models"][0]["handoffs"][0]["verdict"], "close");
        assert_eq!(json["models"][0]["handoffs"][1]["why"], "out of memory");
        assert_eq!(json["devices"][1]["name"], "CUDA0");
    }
}
