//! The ways in which a host can have its memory back: what figure 6 of the paper compares, and its
//! notification.

use serde::Serialize;
use std::fmt;

/// One of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Way {
    /// One request for all, of a guest that readies nothing: hot-remove with stock settings.
    Stock,
    /// A batch at a time.
    Batches,
    /// One request for all, and the guest readies memory ahead.
    PreReclaim,
    /// A batch at a time, and the guest readies memory ahead.
    Both,
    /// As that, and the guest is told beforehand what it will have in the end.
    Proactive,
}

impl Way {
    pub(super) const ALL: [Self; 5] =
        [Self::Stock, Self::Batches, Self::PreReclaim, Self::Both, Self::Proactive];

    /// The way of a guest that hears nothing beforehand, and reacts when its memory goes.
    pub(super) const REACTIVE: Self = Self::Both;

    /// Requests are for a batch at a time.
    pub(super) const fn has_batches(self) -> bool {
        matches!(self, Self::Batches | Self::Both | Self::Proactive)
    }

    /// The manager in the guest readies memory ahead.
    pub(super) const fn readies(self) -> bool {
        matches!(self, Self::PreReclaim | Self::Both | Self::Proactive)
    }

    /// The manager in the guest hears of the size to come.
    pub(super) const fn is_told(self) -> bool {
        matches!(self, Self::Proactive)
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stock => "stock",
            Self::Batches => "batches",
            Self::PreReclaim => "pre-reclaim",
            Self::Both => "both",
            Self::Proactive => "proactive",
        })
    }
}

/// The size to ask for next: a batch below what is there, and not below `target`.
pub(super) fn next_request(plugged: u64, target: u64, batch: Option<u64>) -> u64 {
    batch.map_or(target, |batch| plugged.saturating_sub(batch).max(target))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ways_differ_in_one_thing_each() {
        let parts = |way: Way| [way.has_batches(), way.readies(), way.is_told()];
        assert_eq!(parts(Way::Stock), [false, false, false]);
        assert_eq!(parts(Way::Batches), [true, false, false]);
        assert_eq!(parts(Way::PreReclaim), [false, true, false]);
        assert_eq!(parts(Way::Both), [true, true, false]);
        assert_eq!(parts(Way::Proactive), [true, true, true]);
    }

    #[test]
    fn batches_end_at_the_target() {
        assert_eq!(next_request(1536, 512, None), 512);
        assert_eq!(next_request(1536, 512, Some(256)), 1280);
        assert_eq!(next_request(600, 512, Some(256)), 512);
        assert_eq!(next_request(100, 0, Some(256)), 0);
    }
}
