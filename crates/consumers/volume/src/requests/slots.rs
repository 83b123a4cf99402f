//! Which slots are free: the bound of what all writes of a volume have under way.

use crate::state::{SLOTS, State};
use std::sync::{Condvar, Mutex, MutexGuard};

/// The free slots. The last one that was given back is taken first, so that few of them ever take
/// memory.
#[derive(Debug)]
pub(crate) struct Slots {
    free: Mutex<Free>,
    more: Condvar,
}

#[derive(Debug)]
struct Free {
    slots: Vec<u32>,
    /// Threads that wait for more.
    waiting: usize,
}

impl Slots {
    /// All that the state does not name.
    pub(crate) fn new(state: &State) -> Slots {
        let slots = (0..SLOTS).rev().filter(|slot| state.named(*slot).is_none()).collect();
        Slots { free: Mutex::new(Free { slots, waiting: 0 }), more: Condvar::new() }
    }

    /// Takes so many, all at once: who waits holds none.
    ///
    /// # Panics
    /// If there are not so many at all.
    pub(crate) fn take(&self, count: usize) -> Vec<u32> {
        assert!(count <= SLOTS as usize, "{count} slots");
        let mut free = self.lock();
        loop {
            if let Some(taken) = free.take(count) {
                return taken;
            }
            free.waiting += 1;
            free = self.more.wait(free).expect("no thread panics with the slots");
            free.waiting -= 1;
        }
    }

    /// Takes so many, if they are free, and nobody waits for some.
    pub(crate) fn try_take(&self, count: usize) -> Option<Vec<u32>> {
        let mut free = self.lock();
        // Short requests would have them all, one after the other, before there are enough for a
        // long one.
        if free.waiting > 0 { None } else { free.take(count) }
    }

    /// Gives some back, which the state does not name any more.
    pub(crate) fn give_back(&self, slots: &[u32]) {
        let mut free = self.lock();
        free.slots.extend_from_slice(slots);
        // To wake nobody is a system call, too.
        if free.waiting > 0 {
            self.more.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Free> {
        self.free.lock().expect("no thread panics with the slots")
    }
}

impl Free {
    fn take(&mut self, count: usize) -> Option<Vec<u32>> {
        let first = self.slots.len().checked_sub(count)?;
        Some(self.slots.split_off(first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_testkit::wait_until;

    #[test]
    fn who_waits_for_many_is_not_passed_over_by_those_who_take_few() {
        let slots = Slots::new(&State::create(1).unwrap());
        let held = slots.take(SLOTS as usize - 10);
        std::thread::scope(|scope| {
            let many = scope.spawn(|| slots.take(20));
            wait_until("it waits", || slots.lock().waiting == 1);
            assert_eq!(slots.try_take(1), None);
            slots.give_back(&held[..10]);
            assert_eq!(many.join().unwrap().len(), 20);
        });
        assert_eq!(slots.try_take(1), None, "none is left");
        slots.give_back(&held[10..11]);
        assert_eq!(slots.try_take(1).map(|taken| taken.len()), Some(1));
    }
}
