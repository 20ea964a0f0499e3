//! The report, for people and as JSON.

use std::fmt;

use baton_engines::llama::devices::Device;
use serde::Serialize;

/// GPU backends that this binary was built with.
const BUILT_WITH: [(&str, bool); 3] = [
    ("cuda", cfg!(feature = "cuda")),
    ("metal", cfg!(any(feature = "metal", all(target_os = "macos", target_arch = "aarch64")))),
    ("vulkan", cfg!(feature = "vulkan")),
];

#[derive(Debug, Serialize)]
pub(super) struct DoctorReport {
    version: &'static str,
    system: String,
    /// GPU backends in this binary.
    backends: Vec<&'static str>,
    /// Message if the binary has GPU backends and none of them finds a device.
    missing: Option<String>,
    devices: Vec<Listed>,
    pub(super) speeds: Vec<DeviceSpeed>,
    pub(super) handoffs: Vec<HandoffCheck>,
}

#[derive(Debug, Serialize)]
struct Listed {
    name: String,
    description: String,
    memory_bytes: u64,
}

/// Speed of one device without a handoff.
#[derive(Debug, Default, Serialize)]
pub(super) struct DeviceSpeed {
    pub(super) device: String,
    /// Prompt tokens per second, to the first token.
    pub(super) prefill_tps: f64,
    /// Tokens per second of one stream.
    pub(super) decode_tps: f64,
    /// The reason why no node started on it.
    pub(super) failure: Option<String>,
}

impl DeviceSpeed {
    pub(super) fn failed(device: &str, why: String) -> DeviceSpeed {
        DeviceSpeed { device: device.to_owned(), failure: Some(why), ..DeviceSpeed::default() }
    }
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case", tag = "verdict", content = "why")]
pub(super) enum Verdict {
    /// Equal to the bit.
    Exact,
    /// Within the rounding differences of different kernels.
    Close,
    /// A wrong reply, or an error.
    Failed(String),
}

/// A prompt computed in one place and continued in another.
#[derive(Debug, Serialize)]
pub(super) struct HandoffCheck {
    pub(super) from: String,
    pub(super) to: String,
    /// Bytes of KV, encoded.
    pub(super) n_bytes: u64,
    /// Relative L2 between the KV of both, worst layer; `None` if parts of a sliding window did not travel.
    pub(super) kv_distance: Option<f64>,
    /// KL(alone ‖ handed over), nats a token.
    pub(super) mean_kl: f64,
    /// Positions where both replies have the same likeliest token.
    pub(super) n_agreed: usize,
    /// Positions that were compared: up to the first different token.
    pub(super) n_compared: usize,
    pub(super) prefill_ms: f64,
    /// From the end of the prefill until the decode node is ready.
    pub(super) unhidden_ms: f64,
    #[serde(flatten)]
    pub(super) verdict: Verdict,
}

impl Default for HandoffCheck {
    fn default() -> HandoffCheck {
        HandoffCheck {
            from: String::new(),
            to: String::new(),
            n_bytes: 0,
            kv_distance: None,
            mean_kl: 0.0,
            n_agreed: 0,
            n_compared: 0,
            prefill_ms: 0.0,
            unhidden_ms: 0.0,
            verdict: Verdict::Failed(String::new()),
        }
    }
}

impl HandoffCheck {
    pub(super) fn failed(why: String) -> HandoffCheck {
        HandoffCheck { verdict: Verdict::Failed(why), ..HandoffCheck::default() }
    }
}

impl DoctorReport {
    /// A report without checks yet.
    pub(super) fn new(devices: &[Device]) -> DoctorReport {
        let backends: Vec<&str> = BUILT_WITH.into_iter().filter(|(_, built)| *built).map(|(name, _)| name).collect();
        let lacks_gpu = !backends.is_empty() && devices.len() == 1;
        let missing = lacks_gpu.then(|| format!("built for {}, but no such device was found", backends.join(", ")));
        let listed = |device: &Device| Listed {
            name: device.name.clone(),
            description: device.description.clone(),
            memory_bytes: device.memory,
        };
        DoctorReport {
            version: env!("CARGO_PKG_VERSION"),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            backends,
            missing,
            devices: devices.iter().map(listed).collect(),
            speeds: Vec::new(),
            handoffs: Vec::new(),
        }
    }

    /// Number of failed checks.
    pub(super) fn n_failed(&self) -> usize {
        let devices = self.speeds.iter().filter(|speed| speed.failure.is_some()).count();
        let handoffs = self.handoffs.iter().filter(|h| matches!(h.verdict, Verdict::Failed(_))).count();
        usize::from(self.missing.is_some()) + devices + handoffs
    }
}

impl fmt::Display for DoctorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let backends = if self.backends.is_empty() { "no GPU".to_owned() } else { self.backends.join(", ") };
        writeln!(f, "baton {} on {}, built for {backends}", self.version, self.system)?;
        if let Some(missing) = &self.missing {
            writeln!(f, "FAILED: {missing}")?;
        }
        for device in &self.devices {
            let gib = device.memory_bytes as f64 / (1u64 << 30) as f64;
            writeln!(f, "  {:<10} {} ({gib:.1} GiB)", device.name, device.description)?;
        }
        writeln!(f, "\nalone       prefill tok/s  decode tok/s")?;
        for speed in &self.speeds {
            match &speed.failure {
                None => writeln!(f, "{:<12}{:>13.0}{:>14.1}", speed.device, speed.prefill_tps, speed.decode_tps)?,
                Some(why) => writeln!(f, "{:<12}FAILED: {why}", speed.device)?,
            }
        }
        let width = self.handoffs.iter().map(|h| h.from.chars().count() + h.to.chars().count() + 3).max();
        let width = width.unwrap_or(0).max("handoff".len());
        writeln!(f, "\n{:<width$}  KV distance  mean KL  same token  un-hidden  verdict", "handoff")?;
        for handoff in &self.handoffs {
            let pair = format!("{} → {}", handoff.from, handoff.to);
            let verdict = match &handoff.verdict {
                Verdict::Exact => "exact",
                Verdict::Close => "close",
                Verdict::Failed(why) => {
                    writeln!(f, "{pair:<width$}  FAILED: {why}")?;
                    continue;
                }
            };
            let distance = handoff.kv_distance.map_or_else(|| "–".to_owned(), |d| format!("{d:.1e}"));
            let agreed = format!("{}/{}", handoff.n_agreed, handoff.n_compared);
            let kl = handoff.mean_kl;
            let unhidden = handoff.unhidden_ms;
            writeln!(f, "{pair:<width$}  {distance:>11}  {kl:>7.1e}  {agreed:>10}  {unhidden:>6.1} ms  {verdict}")?;
        }
        Ok(())
    }
}
