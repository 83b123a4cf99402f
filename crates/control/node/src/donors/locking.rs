//! Tells how far a donor is that is to keep what it lends from being swapped out.
//!
//! Donors of a host whose kernel swaps to a volume are to: the kernel could else swap out a donor
//! to memory of that donor, and wait for it for ever.

use std::time::Duration;

/// How far it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Locking {
    /// Nobody has asked for it.
    No,
    /// It is of a version that cannot.
    Unable,
    /// It, or the process after it, has not answered.
    Asked,
    /// It is locked.
    Done,
    /// It is not, and why.
    Refused(String),
}

impl Locking {
    /// State of a donor that an earlier node left, by the donor's own report.
    pub(super) fn of(locked: Option<bool>) -> Locking {
        if locked.is_none() { Locking::Unable } else { Locking::No }
    }

    /// It is wanted. True if the donor is to be told.
    pub(super) fn ask(&mut self) -> bool {
        let is_news = matches!(self, Locking::No | Locking::Refused(_));
        if is_news {
            *self = Locking::Asked;
        }
        is_news
    }

    /// Whether a new process must lock its memory. It may succeed where its predecessor failed.
    pub(super) fn begins(&mut self) -> bool {
        if *self != Locking::No {
            *self = Locking::Asked;
        }
        *self == Locking::Asked
    }

    /// Why a donor that was waited for so long is not locked; `None` if it is.
    pub(super) fn failure(&self, donor: &str, waited: Duration) -> Option<String> {
        let reason = match self {
            Locking::Done => return None,
            Locking::Refused(reason) => reason.clone(),
            Locking::Unable => {
                "it is of an earlier version; drain it, and start it anew".to_owned()
            }
            Locking::No | Locking::Asked => format!("it has not in {} s", waited.as_secs()),
        };
        Some(format!(
            "its host's donor `{donor}` does not lock its memory, and the kernel could swap it out \
             to the volume, and wait for itself: {reason}"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_process_of_a_donor_locks_once_it_is_wanted() {
        let mut locking = Locking::of(Some(false));
        assert!(!locking.begins());
        assert!(locking.ask() && !locking.ask());
        locking = Locking::Done;
        assert!(!locking.ask() && locking.begins());
        locking = Locking::Refused("why".to_owned());
        assert!(locking.failure("a", Duration::ZERO).unwrap().ends_with("itself: why"));
        assert!(locking.ask() && locking.begins());
        locking = Locking::Done;
        assert_eq!(locking.failure("a", Duration::ZERO), None);
    }

    #[test]
    fn one_of_an_earlier_version_is_not_told_and_its_successor_locks() {
        let mut locking = Locking::of(None);
        assert!(!locking.ask());
        assert!(locking.failure("a", Duration::ZERO).unwrap().contains("earlier version"));
        assert!(locking.begins());
    }
}
