//! What became of each figure.

use std::collections::HashMap;

use super::noise::{LEAST_ROUNDS, RoundSpread, by_chance, typical};
use crate::report::{Better, RecordedFigure, Row, dash};

/// What became of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FigureOutcome {
    Worse,
    Improved,
    WithinNoise,
    /// Too few rounds show no spread.
    NotJudged,
    /// Unit or direction differ.
    OtherUnit,
    Missing,
    New,
}

impl FigureOutcome {
    pub(super) const IN_ORDER: [FigureOutcome; 7] = [
        FigureOutcome::Worse,
        FigureOutcome::Improved,
        FigureOutcome::NotJudged,
        FigureOutcome::OtherUnit,
        FigureOutcome::Missing,
        FigureOutcome::New,
        FigureOutcome::WithinNoise,
    ];

    pub(super) fn words(self) -> &'static str {
        match self {
            FigureOutcome::Worse => "WORSE",
            FigureOutcome::Improved => "better",
            FigureOutcome::WithinNoise => "within noise",
            FigureOutcome::NotJudged => "not judged: fewer than 3 rounds",
            FigureOutcome::OtherUnit => "not comparable: other unit",
            FigureOutcome::Missing => "missing in the new report",
            FigureOutcome::New => "new",
        }
    }

    /// False for figures of which only the number is shown.
    pub(super) fn is_listed(self) -> bool {
        self != FigureOutcome::WithinNoise
    }
}

/// A figure of one report or of both.
#[derive(Debug)]
pub(super) struct ComparedFigure {
    name: String,
    pub(super) outcome: FigureOutcome,
    old: Option<RoundSpread>,
    new: Option<RoundSpread>,
    unit: String,
    /// The difference that chance explains.
    by_chance: Option<f64>,
}

/// Compares all figures, in the new report's order, then those that are missing. Changes below `least` of the old median never count.
pub(super) fn compare(old: &[RecordedFigure], new: &[RecordedFigure], least: f64) -> Vec<ComparedFigure> {
    let spreads: Vec<RoundSpread> = old.iter().chain(new).map(|figure| RoundSpread::of(&figure.rounds)).collect();
    let typical = typical(&spreads);
    let by_name: HashMap<&str, &RecordedFigure> = old.iter().map(|figure| (figure.name.as_str(), figure)).collect();
    let in_new = new.iter().map(|new| match by_name.get(new.name.as_str()) {
        None => one_sided(new, FigureOutcome::New),
        Some(old) => both(old, new, least, typical),
    });
    let names: std::collections::HashSet<&str> = new.iter().map(|figure| figure.name.as_str()).collect();
    let missing = old.iter().filter(|figure| !names.contains(figure.name.as_str()));
    in_new.chain(missing.map(|old| one_sided(old, FigureOutcome::Missing))).collect()
}

fn one_sided(figure: &RecordedFigure, outcome: FigureOutcome) -> ComparedFigure {
    let spread = Some(RoundSpread::of(&figure.rounds));
    let (old, new) = if outcome == FigureOutcome::New { (None, spread) } else { (spread, None) };
    let RecordedFigure { name, unit, .. } = figure;
    ComparedFigure { name: name.clone(), outcome, old, new, unit: unit.words().to_owned(), by_chance: None }
}

fn both(old: &RecordedFigure, new: &RecordedFigure, least: f64, typical: f64) -> ComparedFigure {
    let [before, after] = [old, new].map(|figure| RoundSpread::of(&figure.rounds));
    let compared = |outcome, unit: String, by_chance| ComparedFigure {
        name: new.name.clone(),
        outcome,
        old: Some(before),
        new: Some(after),
        unit,
        by_chance,
    };
    if (old.unit, old.better) != (new.unit, new.better) {
        let side = |figure: &RecordedFigure| {
            let direction = match figure.better {
                Better::More => "more",
                Better::Less => "less",
            };
            format!("{} ({direction} is better)", figure.unit.words())
        };
        return compared(FigureOutcome::OtherUnit, format!("{}, now {}", side(old), side(new)), None);
    }
    let unit = new.unit.words().to_owned();
    if before.n.min(after.n) < LEAST_ROUNDS {
        return compared(FigureOutcome::NotJudged, unit, None);
    }
    let noise = by_chance(before, after, typical).max(least * before.median.abs());
    let change = after.median - before.median;
    let gain = match new.better {
        Better::More => change,
        Better::Less => -change,
    };
    let outcome = match (gain > noise, -gain > noise) {
        (true, _) => FigureOutcome::Improved,
        (_, true) => FigureOutcome::Worse,
        _ => FigureOutcome::WithinNoise,
    };
    compared(outcome, unit, Some(noise))
}

impl ComparedFigure {
    /// Name, old, new, unit, change and noise.
    pub(super) fn cells(&self) -> Row {
        let value = |spread: Option<RoundSpread>| spread.map_or_else(dash, |spread| rounded(spread.median));
        let same_unit = self.outcome != FigureOutcome::OtherUnit;
        let base = self.old.map(|old| old.median).filter(|median| *median != 0.0 && same_unit);
        let share = |of: f64| base.map(|base| 100.0 * of / base.abs());
        let change = self.old.zip(self.new).and_then(|(old, new)| share(new.median - old.median));
        vec![
            self.name.clone(),
            value(self.old),
            value(self.new),
            self.unit.clone(),
            change.map_or_else(dash, |percent| format!("{percent:+.1} %")),
            self.by_chance.and_then(share).map_or_else(dash, |percent| format!("± {percent:.1} %")),
        ]
    }
}

/// Three digits at least.
fn rounded(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Unit;

    fn figure(name: &str, unit: Unit, better: Better, rounds: &[f64]) -> RecordedFigure {
        RecordedFigure { name: name.into(), unit, better, rounds: rounds.to_vec() }
    }

    fn outcome(old: RecordedFigure, new: RecordedFigure) -> FigureOutcome {
        let compared = compare(&[old], &[new], 0.03);
        assert_eq!((compared.len(), compared[0].cells().len()), (1, 6));
        compared[0].outcome
    }

    const OLD: [f64; 5] = [100.0, 102.0, 98.0, 101.0, 99.0];

    #[test]
    fn direction_decides_whether_a_change_is_worse() {
        let more = [130.0, 132.0, 128.0, 131.0, 129.0];
        for (better, expected) in [(Better::More, FigureOutcome::Improved), (Better::Less, FigureOutcome::Worse)] {
            let [old, new] = [OLD, more].map(|rounds| figure("x", Unit::Milliseconds, better, &rounds));
            assert_eq!(outcome(old.clone(), new.clone()), expected);
            assert_ne!(outcome(new, old), expected);
        }
    }

    #[test]
    fn noise_small_changes_and_few_rounds_are_no_change() {
        let rate = |rounds: &[f64]| figure("x", Unit::TokensPerSecond, Better::More, rounds);
        let noisy = [80.0, 95.0, 105.0, 90.0, 120.0];
        assert_eq!(outcome(rate(&OLD), rate(&noisy)), FigureOutcome::WithinNoise);
        // Exact figures that differ by 2 %.
        assert_eq!(outcome(rate(&[100.0; 3]), rate(&[98.0; 3])), FigureOutcome::WithinNoise);
        assert_eq!(outcome(rate(&[100.0; 3]), rate(&[96.0; 3])), FigureOutcome::Worse);
        assert_eq!(outcome(rate(&[100.0; 2]), rate(&[50.0; 5])), FigureOutcome::NotJudged);
    }

    #[test]
    fn missing_new_and_other_figures_are_listed() {
        let rate = |name: &str| figure(name, Unit::TokensPerSecond, Better::More, &OLD);
        let time = |name: &str| figure(name, Unit::Milliseconds, Better::Less, &OLD);
        let compared = compare(
            &[rate("kept"), rate("gone"), rate("turned")],
            &[rate("kept"), time("turned"), rate("added")],
            0.03,
        );
        let outcomes: Vec<_> = compared.iter().map(|figure| (figure.name.as_str(), figure.outcome)).collect();
        assert_eq!(
            outcomes,
            [
                ("kept", FigureOutcome::WithinNoise),
                ("turned", FigureOutcome::OtherUnit),
                ("added", FigureOutcome::New),
                ("gone", FigureOutcome::Missing)
            ]
        );
        let cells = compared[1].cells();
        assert!(
            cells[3].contains("tok/s (more is better), now ms (less is better)") && cells[4] == dash(),
            "{cells:?}"
        );
    }
}
