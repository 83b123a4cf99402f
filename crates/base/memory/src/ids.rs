//! The names of things on the wire and in tables.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The number of a page within a space.
pub type PageNo = u64;

/// A space: a linear array of pages in the pool. Chosen at random by the borrower.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct SpaceId(pub u64);

/// An extent as its donor numbers it; never used twice within one life of the donor.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ExtentId(pub u64);

/// The fence of a space: a request with an older epoch than the donor knows is refused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Epoch(pub u64);

/// Which state of a segment's group an extent was last known to be whole in. Rises whenever a
/// member leaves the group: of several extents for a segment those with the highest are the right
/// ones.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub struct Generation(pub u64);

impl Generation {
    /// That of an extent which does not have all of its segment's pages yet.
    pub const FILLING: Generation = Generation(0);

    /// The first one that a borrower of this epoch gives, higher than any of an earlier epoch's.
    pub fn first(epoch: Epoch) -> Generation {
        Generation(epoch.0 << 32 | 1)
    }

    /// The one after it.
    pub fn next(self) -> Generation {
        Generation(self.0 + 1)
    }
}

macro_rules! shown_as_hex {
    ($($name:ident),*) => {$(
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:x})"), self.0)
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:x}", self.0)
            }
        }
    )*};
}

shown_as_hex!(SpaceId, ExtentId, Generation);

impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Epoch({})", self.0)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
