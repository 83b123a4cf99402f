//! Which slots are free: the bound of what all writes of a volume have under way.

use crate::state::{SLOTS, State};
use std::sync::{Condvar, Mutex, MutexGuard};

/// The free slots. The last one that was given back is taken first, so that few of them ever take
/// memory.
#[derive(Debug)]
pub(crate) struct Slots {
    free: Mutex<Vec<u32>>,
    more: Condvar,
}

impl Slots {
    /// All that the state does not name.
    pub(crate) fn new(state: &State) -> Slots {
        let free = (0..SLOTS).rev().filter(|slot| state.named(*slot).is_none()).collect();
        Slots { free: Mutex::new(free), more: Condvar::new() }
    }

    /// Takes so many, all at once: who waits holds none.
    ///
    /// # Panics
    /// If there are not so many at all.
    pub(crate) fn take(&self, count: usize) -> Vec<u32> {
        assert!(count <= SLOTS as usize, "{count} slots");
        let free = self.lock();
        let lacks = |free: &mut Vec<u32>| free.len() < count;
        let mut free = self.more.wait_while(free, lacks).expect("no thread panics with the slots");
        let first = free.len() - count;
        free.split_off(first)
    }

    /// Gives some back, which the state does not name any more.
    pub(crate) fn give_back(&self, slots: &[u32]) {
        self.lock().extend_from_slice(slots);
        self.more.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Vec<u32>> {
        self.free.lock().expect("no thread panics with the slots")
    }
}
