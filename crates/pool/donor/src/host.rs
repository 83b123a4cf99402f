//! Keeps some of the host's memory available, if the donor is to: looks at what the host has left,
//! and lets [`hecaton_policy::pressure`] say how much may be lent.

use crate::lender::Lender;
use hecaton_memory::meminfo::available_bytes;
use hecaton_memory::{Size, pages_to_bytes};
use hecaton_policy::pressure::{Pressure, Seen};
use std::path::PathBuf;
use std::time::Duration;
use tracing::warn;

/// Watch over the host's available memory.
pub(crate) struct HostWatch {
    meminfo: PathBuf,
    pressure: Pressure,
    /// The last look was in vain.
    is_blind: bool,
}

impl HostWatch {
    pub(crate) fn new(meminfo: PathBuf, keep_free: Size, lender: &Lender) -> HostWatch {
        let all_bytes = pages_to_bytes(lender.arena().pages());
        let pressure = Pressure::new(all_bytes, keep_free.0);
        HostWatch { meminfo, pressure, is_blind: false }
    }

    /// Reads the host's available memory, and sets the donor's limit. If it cannot be read, the
    /// limit stays.
    pub(crate) fn look(&mut self, lender: &Lender) {
        let available_bytes = match available_bytes(&self.meminfo) {
            Ok(bytes) => bytes,
            Err(error) => {
                if !std::mem::replace(&mut self.is_blind, true) {
                    warn!(%error, "cannot tell how much memory the host has left");
                }
                return;
            }
        };
        self.is_blind = false;
        let seen = Seen { available_bytes, in_use_bytes: lender.in_use_bytes() };
        let now = Duration::from_millis(lender.now_ms());
        lender.set_host_limit(Size(self.pressure.limit(seen, now)));
    }
}
