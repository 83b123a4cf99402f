//! Which donors have left a lane's requests unanswered, and for how long.
//!
//! Decisions only. A request that has not been answered for the space's patience fails, and its
//! owner asks again: the donor may be back. When such failures have followed each other for long
//! enough, with no answer to any request in between, the donor is taken for gone, and waiting for
//! it for pointless.
//!
//! Judged by page requests alone: a donor whose connections come up and that answers none (behind a
//! network that drops large packets, say) is of no more use than one that is silent.

use crate::map::group::DonorIndex;
use std::time::Duration;

/// A donor's latest row of requests without an answer.
#[derive(Clone, Copy, Debug)]
struct Absence {
    /// When the first of them was asked.
    since: Duration,
    /// When the latest failed.
    until: Duration,
}

/// The donors' absences, as one lane knows them.
#[derive(Debug)]
pub(crate) struct Absences {
    patience: Duration,
    give_up: Duration,
    donors: Vec<Option<Absence>>,
}

impl Absences {
    /// For requests that fail after `patience`, and donors that are given up after `give_up`.
    pub(crate) fn new(patience: Duration, give_up: Duration) -> Absences {
        Absences { patience, give_up, donors: Vec::new() }
    }

    /// The donor has answered a page request.
    pub(crate) fn answered(&mut self, donor: DonorIndex) {
        if let Some(absence) = self.donors.get_mut(donor.0 as usize) {
            *absence = None;
        }
    }

    /// A request has had no answer from the donor for the patience. Returns for how long it has
    /// been away, if that is too long.
    pub(crate) fn unanswered(&mut self, donor: DonorIndex, now: Duration) -> Option<Duration> {
        let index = donor.0 as usize;
        if self.donors.len() <= index {
            self.donors.resize(index + 1, None);
        }
        let asked = now.saturating_sub(self.patience);
        let absence = &mut self.donors[index];
        // Nothing is known of the time before, if nobody asked for a while.
        let goes_on = absence.filter(|absence| asked <= absence.until + self.patience);
        let since = goes_on.map_or(asked, |absence| absence.since);
        *absence = Some(Absence { since, until: now });
        let away = now.saturating_sub(since);
        (away >= self.give_up).then_some(away)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DONOR: DonorIndex = DonorIndex(3);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn absences() -> Absences {
        Absences::new(at(10), at(60))
    }

    #[test]
    fn a_donor_is_given_up_after_a_row_of_failures() {
        let mut absences = absences();
        for seconds in [110, 120, 130, 141, 155] {
            assert_eq!(absences.unanswered(DONOR, at(seconds)), None);
        }
        assert_eq!(absences.unanswered(DONOR, at(165)), Some(at(65)));
        assert_eq!(absences.unanswered(DonorIndex(0), at(166)), None, "another donor's affair");
    }

    #[test]
    fn an_answer_begins_anew() {
        let mut absences = absences();
        for round in 0..5 {
            for seconds in [10, 20, 30, 40, 50] {
                assert_eq!(absences.unanswered(DONOR, at(round * 60 + seconds)), None);
            }
            absences.answered(DONOR);
        }
    }

    #[test]
    fn failures_far_apart_say_nothing_of_the_time_between() {
        let mut absences = absences();
        for round in 0..20 {
            assert_eq!(absences.unanswered(DONOR, at(10 + round * 40)), None);
        }
    }

    #[test]
    fn an_impatient_space_gives_up_with_the_first_failure() {
        let mut absences = Absences::new(at(2), at(2));
        assert_eq!(absences.unanswered(DONOR, at(100)), Some(at(2)));
    }
}
