//! Where things stand in the ledger's memory.
//!
//! ```text
//! 64-bit words   header             512 words, one page
//!                spaces             16 words each
//!                extents            5 words each
//!                written            one bit for each page of the arena
//!                parked             the same
//! 32-bit words   sums               one for each page of the arena
//! ```
//!
//! The file is as long as all of that, and sparse: only what was ever written takes memory. That is
//! 4 KiB for every 4 MiB of pages written, and next to nothing beside.

use crate::extents::table::TableLimits;

/// First word of a ledger, which changes with the layout: "HECLEDG" and a number.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"HECLEDG3");

/// Words of the header.
pub(crate) mod header {
    /// Which layout this is. Written last, when the ledger is complete.
    pub(crate) const MAGIC: usize = 0;
    /// The arena's pages.
    pub(crate) const PAGES: usize = 1;
    /// The smallest order that is lent.
    pub(crate) const MIN_ORDER: usize = 2;
    /// This life of the donor.
    pub(crate) const BOOT: usize = 3;
    /// The number that the next extent will have.
    pub(crate) const NEXT_EXTENT: usize = 4;
    /// Space slots that were ever used, from the first one on.
    pub(crate) const SPACES_USED: usize = 5;
    /// Extent slots that were ever used, from the first one on.
    pub(crate) const EXTENTS_USED: usize = 6;
    /// How many zones there are.
    pub(crate) const ZONES: usize = 7;
    /// Pages and node of each zone.
    pub(crate) const FIRST_ZONE: usize = 8;
    /// All of the header.
    pub(crate) const WORDS: usize = 512;
}

/// Words of a space's record.
pub(crate) mod space {
    /// Whether the slot is in use. Written last, and cleared first.
    pub(crate) const USED: usize = 0;
    pub(crate) const SPACE: usize = 1;
    pub(crate) const FENCE: usize = 2;
    pub(crate) const LEASE_MS: usize = 3;
    pub(crate) const NAME_BYTES: usize = 4;
    pub(crate) const NAME: usize = 5;
    /// The node that it belongs to, in two words; the first is 0 as long as that is nobody, and is
    /// written last.
    pub(crate) const OWNER: usize = 13;
    /// The space that has the owner. A process of an earlier version, which knew no owners, may
    /// have given the slot to another space since.
    pub(crate) const OWNED: usize = 15;
    pub(crate) const WORDS: usize = 16;
}

/// Words of an extent's record.
pub(crate) mod extent {
    /// The extent's number, which is never 0; 0 if the slot is free. Written last, cleared first.
    pub(crate) const EXTENT: usize = 0;
    pub(crate) const SPACE: usize = 1;
    pub(crate) const SEGMENT: usize = 2;
    /// First page in the low 48 bits, then order and member in 8 bits each.
    pub(crate) const PLACE: usize = 3;
    /// Its generation, see [`crate::extents::standing`].
    pub(crate) const GENERATION: usize = 4;
    pub(crate) const WORDS: usize = 5;
}

/// Most spaces that a donor knows.
const MAX_SPACES: usize = 16 << 10;

/// Most extents that a donor lends: 16 TiB in extents of 64 MiB.
const MAX_EXTENTS: u64 = 256 << 10;

/// Where the parts of a ledger begin, in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) pages: u64,
    pub(crate) limits: TableLimits,
}

impl Layout {
    pub(crate) fn new(pages: u64, min_order: u8) -> Layout {
        let extents = (pages >> min_order).min(MAX_EXTENTS) as usize;
        Layout { pages, limits: TableLimits { extents, spaces: MAX_SPACES, min_order } }
    }

    pub(crate) fn space(&self, slot: usize) -> usize {
        debug_assert!(slot < self.limits.spaces);
        header::WORDS + slot * space::WORDS
    }

    pub(crate) fn extent(&self, slot: usize) -> usize {
        debug_assert!(slot < self.limits.extents);
        header::WORDS + self.limits.spaces * space::WORDS + slot * extent::WORDS
    }

    /// The word that holds the "written" bit of page 0.
    pub(crate) fn written(&self) -> usize {
        header::WORDS + self.limits.spaces * space::WORDS + self.limits.extents * extent::WORDS
    }

    /// The word that holds the "parked" bit of page 0.
    pub(crate) fn parked(&self) -> usize {
        self.written() + self.pages.div_ceil(64) as usize
    }

    /// 64-bit words in all.
    pub(crate) fn wide(&self) -> usize {
        self.parked() + self.pages.div_ceil(64) as usize
    }
}
