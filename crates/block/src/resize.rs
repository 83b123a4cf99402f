//! Another size for a volume, while clients use it.
//!
//! Its space and its tables have room for the largest volume, so that only a number changes. Requests
//! that come later see it; a client of NBD learns of it when it connects again, and until then what it
//! asks for beyond the end is refused.

use crate::ResizeError;
use crate::page_locks::Access;
use crate::state::{self, Page};
use crate::volume::Volume;
use hecaton_memory::pages_to_bytes;

impl Volume {
    /// Gives the volume so many pages. It becomes smaller only if nothing beyond the new end is in use.
    pub fn resize(&self, pages: u64) -> Result<(), ResizeError> {
        state::check(pages)?;
        let _turn = self.resizing.lock().expect("no thread panics as it resizes");
        // What was answered and is not written yet is in use, too.
        if let Some(buffer) = &self.buffer {
            buffer.flush().map_err(|_| ResizeError::Stuck)?;
        }
        let before = self.state.pages();
        // Requests that began before the size changes are over; those that wait look at it again.
        let beyond = pages.min(before)..pages.max(before);
        let lock = self.locks.lock(beyond.clone(), Access::Exclusive);
        let _lock = lock.map_err(|_| ResizeError::Stuck)?;
        if pages < before {
            let is_used =
                |page: &u64| self.state.page(*page) != Page::Hole || self.is_buffered(*page);
            let used = beyond.filter(is_used).fold((0, 0), |(count, _), page| (count + 1, page));
            if let (count @ 1.., last) = used {
                let (bytes, end) = (pages_to_bytes(count), pages_to_bytes(last + 1));
                return Err(ResizeError::InUse { bytes, end });
            }
        }
        self.state.set_pages(pages);
        Ok(())
    }
}
