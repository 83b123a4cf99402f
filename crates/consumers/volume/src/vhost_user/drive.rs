//! What a guest may do with the volume, and when its writes are answered.
//!
//! A driver that does not take up the FLUSH feature cannot ask for what it wrote to be kept, so its
//! writes are answered when they are (virtio 1.2, section 5.2.6.2). Firmware may be like that.

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
