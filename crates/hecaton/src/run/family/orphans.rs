//! Reaps orphans where `hecaton run` is process 1, as in a container: nobody else does.
//!
//! Helpers of the program's processes are orphans from the start, and programs leave others behind.

use rustix::process::{Pid, WaitId, WaitIdOptions, getpid, waitid};

/// Children that somebody waits for.
pub(crate) struct Orphans {
    waited_for: Vec<Pid>,
}

impl Orphans {
    pub(crate) fn except(waited_for: impl IntoIterator<Item = u32>) -> Orphans {
        let pid = |id: u32| Pid::from_raw(id.cast_signed());
        Orphans { waited_for: waited_for.into_iter().filter_map(pid).collect() }
    }

    /// Reaps all that have ended, up to the first child that somebody waits for. Must be called
    /// again whenever a child has ended.
    pub(crate) fn reap(&self) {
        while getpid() == Pid::INIT
            && let Some(pid) = ended_child()
            && !self.waited_for.contains(&pid)
        {
            // An error means that it is gone.
            let _ = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG);
        }
    }
}

/// A child that has ended, and stays to be reaped.
fn ended_child() -> Option<Pid> {
    let options = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: an all-zero siginfo_t is valid, and the kernel fills it in where a child has ended.
    let child = unsafe {
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let waited = libc::waitid(libc::P_ALL, 0, &raw mut info, options);
        if waited == 0 { info.si_pid() } else { 0 }
    };
    Pid::from_raw(child)
}
