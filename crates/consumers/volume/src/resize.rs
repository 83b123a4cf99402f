//! Changes a volume's size while clients use it.
//!
//! The space and the tables of a volume have room for the largest one, so that only a number
//! changes. Later requests see the new size, and are refused beyond the end. A front that can tell
//! its users of it watches ([`Watch`]): a monitor's drive, a block device. The kernel reads a
//! file's size again after a second. A client of NBD learns of it when it connects again.

use crate::ResizeError;
use crate::requests::page_locks::Access;
use crate::state::{self, Page};
use crate::volume::Volume;
use hecaton_memory::pages_to_bytes;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

/// One who wants to know that a volume has another size.
pub(crate) trait Watch: Send + Sync {
    /// It has one from now on. Must not wait for requests to the volume.
    fn resized(&self);
}

/// All of them, as long as they are there.
#[derive(Default)]
pub(crate) struct Watchers(Mutex<Vec<Weak<dyn Watch>>>);

impl Watchers {
    fn alive(&self) -> MutexGuard<'_, Vec<Weak<dyn Watch>>> {
        let mut watchers = self.0.lock().expect("no thread panics with those who watch");
        watchers.retain(|watcher| watcher.strong_count() > 0);
        watchers
    }

    fn tell(&self) {
        // Copied, as one may be added while another one is told.
        let watchers = self.alive().clone();
        watchers.iter().filter_map(Weak::upgrade).for_each(|watcher| watcher.resized());
    }
}

impl Volume {
    /// Tells this one, too, when the volume has another size.
    pub(crate) fn watch<W: Watch + 'static>(&self, watcher: &Arc<W>) {
        let watcher: Weak<W> = Arc::downgrade(watcher);
        self.watchers.alive().push(watcher);
    }

    /// Gives the volume so many pages. It becomes smaller only if nothing beyond the new end is in
    /// use.
    pub fn resize(&self, pages: u64) -> Result<(), ResizeError> {
        state::check(pages)?;
        let _turn = self.resizing.lock().expect("no thread panics as it resizes");
        // Answered writes in the buffer are in use, too.
        if let Some(buffer) = &self.buffer {
            buffer.flush().map_err(|_| ResizeError::Stuck)?;
        }
        let before = self.state.pages();
        // Requests that began before the size changes are over; those that wait look at it again.
        let beyond = pages.min(before)..pages.max(before);
        let lock = self.locks.lock(beyond.clone(), Access::Exclusive);
        let lock = lock.map_err(|_| ResizeError::Stuck)?;
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
        drop(lock);
        self.watchers.tell();
        Ok(())
    }
}
