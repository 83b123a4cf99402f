//! The stages of an address space, from its program's first word to its first page served.

/// How far an address space has come. Written down, so that a successor knows what the other side
/// has been told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    /// Its entries are being made. The other side waits, and asks again if the connection ends.
    Preparing,
    /// A child: its parent may fork, or has forked, or its child may be saying so.
    Forking {
        /// `None` if it has ended since.
        parent: Option<usize>,
    },
    /// All is done; it may have been welcomed or not. There is no helper yet.
    Welcoming,
    /// It runs.
    Live,
}

impl Stage {
    pub(crate) fn to_word(self) -> u64 {
        match self {
            Stage::Live => 0,
            Stage::Preparing => 1,
            Stage::Welcoming => 2,
            Stage::Forking { parent } => 3 | parent.map_or(0, |index| index as u64 + 1) << 8,
        }
    }

    pub(crate) fn from_word(word: u64) -> Stage {
        match word & 0xFF {
            0 => Stage::Live,
            1 => Stage::Preparing,
            2 => Stage::Welcoming,
            _ => Stage::Forking { parent: (word >> 8).checked_sub(1).map(|index| index as usize) },
        }
    }
}
