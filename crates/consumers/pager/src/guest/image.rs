//! A snapshot's memory, put into the pool before the machine that is restored from it comes.
//!
//! The pages belong to no process yet: their entries are those of an address space that no process
//! ever has. When a machine hands its memory over, they become its own. A kill while the image is
//! loaded costs nothing but time: entries tell what is there already, and the rest is loaded again.

use crate::core::Core;
use crate::evict::Evictor;
use crate::fault::{Content, examine};
use crate::state::entry::{Entry, Place};
use crate::state::tables::Key;
use crate::state::{CHUNK_PAGES, Flag, IMAGE_SPACE};
use hecaton_memory::PAGE_SIZE;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

/// Bytes of an image, which must be of whole pages.
pub(crate) fn image_bytes(path: &Path) -> io::Result<u64> {
    let bytes = File::open(path)?.metadata()?.len();
    if bytes == 0 || !bytes.is_multiple_of(PAGE_SIZE as u64) {
        let why = format!("{} has {bytes} bytes, which are no whole pages", path.display());
        return Err(io::Error::other(why));
    }
    Ok(bytes)
}

impl Evictor {
    /// Puts all of the image into the pool.
    pub(crate) fn load_image(&mut self, path: &Path) -> io::Result<()> {
        let pages = image_bytes(path)? / PAGE_SIZE as u64;
        let file = File::open(path)?;
        let mut page = vec![0u8; PAGE_SIZE];
        for number in 0..pages {
            if self.shared.lock().over || self.shared.lock().failed.is_some() {
                return Ok(());
            }
            let key = Key::new(IMAGE_SPACE, number);
            if self.shared.lock().get(key) != Entry::ZERO {
                continue;
            }
            file.read_exact_at(&mut page, number * PAGE_SIZE as u64)?;
            if let Content::Sum(sum) = examine(&page) {
                self.stage_image_page(key, &page, sum);
            }
            if number % CHUNK_PAGES == CHUNK_PAGES - 1 {
                self.writer.send();
                self.writer.collect(None);
            }
        }
        self.shared.lock().state.note(Flag::ImageLoaded, true);
        Ok(())
    }

    fn stage_image_page(&mut self, key: Key, bytes: &[u8], sum: hecaton_memory::PageSum) {
        loop {
            let mut guard = self.shared.lock();
            let core = &mut *guard;
            let Some(slot) = core.take_slot() else {
                drop(guard);
                // Slots are free again once donors have acknowledged what is in them.
                self.writer.send();
                self.writer.collect(Some(Duration::from_millis(1)));
                if self.shared.lock().failed.is_some() {
                    return;
                }
                continue;
            };
            // SAFETY: the slot was taken, so nothing else uses its 4096 bytes.
            unsafe { core.state.slot(slot).copy_from(bytes.as_ptr(), PAGE_SIZE) };
            let page = core.stage_out(key, Entry::ZERO, slot, sum);
            drop(guard);
            return self.writer.stage(page, sum, slot);
        }
    }
}

impl Core {
    /// Pages of the image become pages of an address space.
    pub(super) fn move_image(&mut self, index: usize, vpn: u64, first: u64, count: u64) {
        for chunk in self.tables.chunks_in(IMAGE_SPACE, first..first + count) {
            let from = chunk.vpn().max(first);
            let to = (chunk.vpn() + CHUNK_PAGES).min(first + count);
            for number in from..to {
                let old = Key::new(IMAGE_SPACE, number);
                let entry = self.get(old);
                if entry.place() == Place::Out {
                    // After a kill in between both name it, and the count is made anew.
                    self.set(Key::new(index, vpn + number - first), entry);
                    self.set(old, Entry::ZERO);
                }
            }
        }
    }
}
