//! Gives a guest access to a volume, and decides when its writes are answered.
//!
//! A driver without the FLUSH feature cannot flush. So its writes are answered once they are stored
//! (virtio 1.2, section 5.2.6.2). Firmware may be such a driver.

use super::config::FLUSH;
use crate::BlockError;
use crate::attach::Role;
use crate::volume::{Caching, Volume};
use std::sync::Arc;

/// A volume as the drive of a guest.
#[derive(Clone)]
pub(super) struct Drive {
    pub(super) volume: Arc<Volume>,
    pub(super) role: Role,
    caching: Caching,
}

impl Drive {
    /// The drive of a guest that has taken up these features.
    pub(super) fn new(volume: Arc<Volume>, role: Role, features: u64) -> Drive {
        let caching = match features & FLUSH {
            0 => Caching::WriteThrough,
            _ => Caching::WriteBack,
        };
        Drive { volume, role, caching }
    }

    pub(super) fn write(&self, offset: u64, data: &[u8]) -> Result<(), BlockError> {
        self.volume.write_as(self.caching, offset, data)
    }

    pub(super) fn write_zeroes(
        &self,
        offset: u64,
        bytes: u64,
        allocate: bool,
    ) -> Result<(), BlockError> {
        self.volume.write_zeroes_as(self.caching, offset, bytes, allocate)
    }
}
