//! The end of a volume's files.

use std::sync::{Condvar, Mutex, MutexGuard};

/// Lets requests through until it is closed.
#[derive(Default)]
pub(super) struct Gate {
    state: Mutex<GateState>,
    left: Condvar,
}

#[derive(Default)]
struct GateState {
    is_closed: bool,
    within: usize,
}

impl Gate {
    pub(super) fn enter(&self) -> bool {
        let mut state = self.state();
        if !state.is_closed {
            state.within += 1;
        }
        !state.is_closed
    }

    pub(super) fn leave(&self) {
        let mut state = self.state();
        state.within -= 1;
        if state.within == 0 {
            self.left.notify_all();
        }
    }

    /// Lets nothing through any more, and waits until all have left.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.is_closed = true;
        let is_any_within = |state: &mut GateState| state.within > 0;
        let left = self.left.wait_while(state, is_any_within);
        drop(left.expect("no thread panics with the gate"));
    }

    fn state(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().expect("no thread panics with the gate")
    }
}
