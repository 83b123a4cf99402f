//! In which order things are measured, and what is made of the figures. No I/O and no clock.

use super::ways::Way;
use crate::bench::measure::stats::Spread;
use serde::Serialize;

/// One measurement: which of the guests that are up, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Turn {
    pub(super) round: usize,
    pub(super) guest: usize,
    pub(super) way: Way,
}

/// All ways with all guests in each round; each round begins with another one, so that none is
/// always the first after whatever the machine did.
pub(super) fn turns(rounds: usize, guests: usize) -> Vec<Turn> {
    let all: Vec<_> =
        Way::ALL.into_iter().flat_map(|way| (0..guests).map(move |guest| (guest, way))).collect();
    let turn = |round: usize, at: usize| {
        let (guest, way) = all[(at + round) % all.len()];
        Turn { round, guest, way }
    };
    (0..rounds).flat_map(|round| (0..all.len()).map(move |at| turn(round, at))).collect()
}

/// How a guest gave what it was asked for.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Given {
    pub(super) bytes: u64,
    pub(super) seconds: f64,
    /// Part of `seconds` until the manager in the guest was ready, or its time was over.
    pub(super) ready_seconds: Option<f64>,
    pub(super) end: End,
}

/// How it ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum End {
    /// It has given all.
    All,
    /// It was given up; what it gave until then counts.
    GivenUp,
    /// The guest's kernel killed the application for want of memory.
    Killed,
}

impl Given {
    /// None if an application paid for it with its life.
    fn mib_per_s(&self) -> Option<f64> {
        let mib = self.bytes as f64 / f64::from(1 << 20);
        (self.end != End::Killed).then(|| mib / self.seconds)
    }
}

/// Result of one way.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(super) struct Result {
    pub(super) way: Way,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) mib_per_s: Option<Spread>,
    /// Against stock settings in the same round, with the first of the guests that are up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) to_stock: Option<Spread>,
    /// Ratio of a told guest to the same guest that is not told, in the same round. The paper calls
    /// these proactive and reactive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) to_reactive: Option<Spread>,
    /// Seconds of it that the host waits for a guest that it has told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ready_s: Option<Spread>,
    /// Times that it was measured; of these, that it had not given all in time, and that its
    /// application was killed.
    pub(super) measured: usize,
    pub(super) given_up: usize,
    pub(super) killed: usize,
}

/// Summarizes all samples of `way` with one guest.
pub(super) fn result(samples: &[(Turn, Given)], guest: usize, way: Way) -> Result {
    let of = |guest: usize, way: Way| {
        samples.iter().filter(move |(turn, _)| turn.guest == guest && turn.way == way)
    };
    let ended = |end: End| of(guest, way).filter(|(_, given)| given.end == end).count();
    let speeds: Vec<_> = of(guest, way).filter_map(|(_, given)| given.mib_per_s()).collect();
    let ratios = |yardstick: usize, other: Way| -> Vec<f64> {
        let ratio = |(turn, given): &(Turn, Given)| {
            let other = of(yardstick, other).find(|(other, _)| other.round == turn.round)?;
            let ratio = given.mib_per_s()? / other.1.mib_per_s()?;
            // A run that gave nothing at all says nothing of how much more another gave.
            ratio.is_finite().then_some(ratio)
        };
        of(guest, way).filter_map(ratio).collect()
    };
    let to_reactive = if way.is_told() { ratios(guest, Way::REACTIVE) } else { Vec::new() };
    let ready: Vec<_> = of(guest, way).filter_map(|(_, given)| given.ready_seconds).collect();
    Result {
        way,
        mib_per_s: Spread::of(&speeds),
        to_stock: Spread::of(&ratios(0, Way::Stock)),
        to_reactive: Spread::of(&to_reactive),
        ready_s: Spread::of(&ready),
        measured: of(guest, way).count(),
        given_up: ended(End::GivenUp),
        killed: ended(End::Killed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_round_has_all_and_begins_with_another() {
        let turns = turns(3, 2);
        assert_eq!(turns.len(), 3 * 2 * Way::ALL.len());
        for round in 0..3 {
            let of: Vec<_> = turns.iter().filter(|turn| turn.round == round).collect();
            for way in Way::ALL {
                for guest in 0..2 {
                    let times = of.iter().filter(|turn| turn.way == way && turn.guest == guest);
                    assert_eq!(times.count(), 1);
                }
            }
        }
        let first = |round| turns.iter().find(|turn| turn.round == round).unwrap();
        assert_eq!((first(0).guest, first(0).way), (0, Way::Stock));
        assert_eq!((first(1).guest, first(1).way), (1, Way::Stock));
        assert_eq!((first(2).guest, first(2).way), (0, Way::Batches));
    }

    fn sample(round: usize, way: Way, mib: u64, end: End) -> (Turn, Given) {
        let given = Given { bytes: mib << 20, seconds: 2.0, ready_seconds: None, end };
        (Turn { round, guest: 0, way }, given)
    }

    #[test]
    fn ratios_are_those_of_a_round() {
        let samples = [
            sample(0, Way::Both, 300, End::All),
            sample(0, Way::Stock, 100, End::All),
            sample(1, Way::Stock, 400, End::GivenUp),
            sample(1, Way::Both, 800, End::All),
        ];
        let both = result(&samples, 0, Way::Both);
        let ratios = Spread { median: 2.5, min: 2.0, max: 3.0 };
        assert_eq!((both.to_stock, both.measured), (Some(ratios), 2));
        let stock = result(&samples, 0, Way::Stock);
        assert_eq!(stock.mib_per_s, Some(Spread { median: 125.0, min: 50.0, max: 200.0 }));
        assert_eq!(stock.to_stock.map(|spread| spread.max), Some(1.0));
        assert_eq!((stock.given_up, stock.killed), (1, 0));
        let none = result(&samples, 1, Way::Both);
        assert_eq!((none.mib_per_s, none.to_stock, none.measured), (None, None, 0));
    }

    #[test]
    fn who_is_told_is_compared_with_who_is_not() {
        let of = |guest, (turn, given): (Turn, Given)| (Turn { guest, ..turn }, given);
        let samples = [
            of(0, sample(0, Way::Both, 999, End::All)),
            of(1, sample(0, Way::Both, 100, End::All)),
            of(1, sample(0, Way::Proactive, 250, End::All)),
            of(1, sample(1, Way::Both, 100, End::Killed)),
            of(1, sample(1, Way::Proactive, 700, End::All)),
        ];
        let ratio = Spread { median: 2.5, min: 2.5, max: 2.5 };
        assert_eq!(result(&samples, 1, Way::Proactive).to_reactive, Some(ratio));
        assert_eq!(result(&samples, 1, Way::Both).to_reactive, None);
    }

    #[test]
    fn what_a_killed_application_has_left_is_no_speed() {
        let samples =
            [sample(0, Way::Stock, 900, End::Killed), sample(0, Way::Both, 300, End::All)];
        let stock = result(&samples, 0, Way::Stock);
        assert_eq!((stock.mib_per_s, stock.measured, stock.killed), (None, 1, 1));
        let both = result(&samples, 0, Way::Both);
        assert_eq!(both.mib_per_s.map(|spread| spread.median), Some(150.0));
        assert_eq!(both.to_stock, None);
        let nothing = [sample(0, Way::Stock, 0, End::GivenUp), samples[1]];
        assert_eq!(result(&nothing, 0, Way::Both).to_stock, None, "no infinite ratio");
    }
}
