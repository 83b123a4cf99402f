//! Ends a program whose helper has ended before it.
//!
//! A helper ends when its program does, or leaves its memory by `exec`. One that ends earlier was
//! killed. Its program must not run on: nothing of it can be evicted any more, and pages that the
//! helper had moved into the area and not told of would be answered with zeros.

use crate::core::Core;
use crate::programs::address_space::AddressSpace;
use crate::programs::attach;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

impl Core {
    /// The connection to a helper has ended. Tears the address space down if its memory is gone;
    /// otherwise kills the program, once, and must be called again until the memory is gone.
    pub(crate) fn lose_helper(&mut self, index: usize) {
        let Some(Some(space)) = self.spaces.get_mut(index) else { return };
        if space.has_ended() {
            return self.end_space(index);
        }
        self.kill_once(index);
    }

    /// The same for a successor, whose predecessor's batch may name the address space.
    pub(crate) fn lose_helper_before_settling(&mut self, index: usize) {
        let Some(Some(space)) = self.spaces.get_mut(index) else { return };
        space.gone = space.has_ended();
        if !space.gone {
            self.kill_once(index);
        }
    }

    fn kill_once(&mut self, index: usize) {
        let Some(Some(space)) = self.spaces.get_mut(index) else { return };
        if !space.helper_lost {
            space.helper_lost = true;
            kill(space);
        }
    }
}

fn kill(space: &AddressSpace) {
    let (Some(helper), Some(pid)) = (space.helper, space.pid) else { return };
    // The process that was looked up has this memory, unless another has got the number and has
    // memory of the library's at the same place.
    if let Some(number) = Pid::from_raw(pid)
        && let Ok(process) = pidfd_open(number, PidfdFlags::empty())
        && attach::is_readable(pid, &helper.own)
        && !space.has_ended()
    {
        tracing::error!(pid, "the helper of a process was killed; the process is ended");
        // An error means that it has ended.
        let _ = pidfd_send_signal(&process, Signal::KILL);
    }
}
