//! Loses pages whose write failed, in a volume that is the disk of shared memory.

use super::Volume;
use crate::state::{Page, SEGMENT_PAGES};
use hecaton_memory::PageNo;
use std::ops::Range;

impl Volume {
    /// A write of these pages failed, and their lock is held. The page cache has what was written,
    /// and would drop it: what is read later must not be the contents of before.
    pub(super) fn lose_unkept(&self, pages: Range<PageNo>) {
        if self.config.shared_memory_of.is_none() {
            return;
        }
        for page in pages {
            self.state.begun(page / SEGMENT_PAGES);
            self.note(page, Page::Lost);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::BlockError;
    use crate::volume::tests::{World, read};

    #[test]
    fn a_page_of_shared_memory_whose_write_failed_is_lost_until_it_is_written() {
        for (of, is_lost) in [(None, false), (Some(1), true)] {
            let mut world = World::full();
            world.config.shared_memory_of = of;
            let volume = world.volume();
            volume.write(0, &[7; 4096]).expect("there is room");
            let beyond = World::FIRST_WITHOUT_ROOM;
            volume.write(beyond, &[8; 4096]).expect_err("there is none");
            let mut page = [1; 4096];
            match volume.read(beyond, &mut page) {
                Err((at, BlockError::Unkept(_))) => assert!(is_lost && at == beyond),
                other => assert!(!is_lost && other.is_ok() && page == [0; 4096]),
            }
            assert_eq!(read(&volume, 0, 4096), [7; 4096]);
            volume.release().expect("released");
        }
    }
}
