//! A flag that ends waiting threads, and a bell that wakes one early.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// Set once; whoever waits on it wakes.
#[derive(Debug, Default)]
pub struct Stop {
    set: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    /// Sets it.
    pub fn set(&self) {
        *self.set.lock().expect("no thread panics with the flag") = true;
        self.changed.notify_all();
    }

    /// Whether it is set.
    pub fn is_set(&self) -> bool {
        *self.set.lock().expect("no thread panics with the flag")
    }

    /// Waits for as long as `patience`, and says whether it is set.
    pub fn wait(&self, patience: Duration) -> bool {
        let set = self.set.lock().expect("no thread panics with the flag");
        let (set, _) = self
            .changed
            .wait_timeout_while(set, patience, |set| !*set)
            .expect("no thread panics with the flag");
        *set
    }
}

/// Rung when there is news; one thread waits for it. Rings while it does not wait count as one.
#[derive(Debug, Default)]
pub struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    /// Rings it.
    pub fn ring(&self) {
        *self.rung.lock().expect("no thread panics with the bell") = true;
        self.changed.notify_all();
    }

    /// Waits for a ring, no longer than `patience`.
    pub fn wait(&self, patience: Duration) {
        let rung = self.rung.lock().expect("no thread panics with the bell");
        let (mut rung, _) = self
            .changed
            .wait_timeout_while(rung, patience, |rung| !*rung)
            .expect("no thread panics with the bell");
        *rung = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::thread;

    const LONG: Duration = Duration::from_secs(3600);

    #[test]
    fn a_set_flag_ends_every_wait() {
        let stop = Arc::new(Stop::default());
        assert!(!stop.wait(Duration::ZERO));
        let waiter = thread::spawn({
            let stop = Arc::clone(&stop);
            move || stop.wait(LONG)
        });
        stop.set();
        assert!(waiter.join().expect("joined") && stop.wait(LONG) && stop.is_set());
    }

    #[test]
    fn a_ring_is_heard_once_even_if_it_comes_early() {
        let bell = Bell::default();
        bell.ring();
        bell.ring();
        bell.wait(LONG);
        assert!(!*bell.rung.lock().expect("not poisoned"));
        bell.wait(Duration::ZERO);
    }
}
