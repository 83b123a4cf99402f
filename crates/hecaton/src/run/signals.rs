//! Signals that are sent to this command and meant for the program.
//!
//! This command blocks signals and takes them one by one with `sigwaitinfo` rather than by
//! handlers, because the sender matters. Signals of the terminal reach the program directly, as it
//! is in the same process group, and must not reach it twice. The command passes on a signal that a
//! process sends to the command alone.

use anyhow::Context as _;
use rustix::process::{Pid, Signal, getpid, kill_process};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::ptr;

/// Signals that are passed on.
const FORWARDED: [libc::c_int; 8] = [
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGCONT,
    libc::SIGTSTP,
];

/// Signals that end a wait for something that is not the program.
const ENDING: [libc::c_int; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];

/// The signals of this process, held back.
#[derive(Debug)]
pub(crate) struct Signals {
    held: libc::sigset_t,
    before: libc::sigset_t,
}

impl Signals {
    /// Holds back all signals that are passed on, in this thread and those that it starts.
    pub(crate) fn hold() -> anyhow::Result<Signals> {
        let signals = FORWARDED.into_iter().chain([libc::SIGCHLD]);
        // SAFETY: the sets are initialised by sigemptyset and pthread_sigmask before they are
        // used; SIGCHLD's default disposition has no handler to be unsafe.
        unsafe {
            let mut held = MaybeUninit::uninit();
            libc::sigemptyset(held.as_mut_ptr());
            for signal in signals {
                libc::sigaddset(held.as_mut_ptr(), signal);
            }
            // Where a parent left it ignored, the kernel would reap the program unseen.
            libc::signal(libc::SIGCHLD, libc::SIG_DFL);
            let held = held.assume_init();
            let mut before = MaybeUninit::uninit();
            let error =
                libc::pthread_sigmask(libc::SIG_BLOCK, &raw const held, before.as_mut_ptr());
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error)).context("cannot hold signals");
            }
            Ok(Signals { held, before: before.assume_init() })
        }
    }

    /// The signal mask before [`Signals::hold`].
    pub(crate) fn before(&self) -> libc::sigset_t {
        self.before
    }

    /// Makes `command` start with the signals as they were before.
    pub(crate) fn release_in(&self, command: &mut Command) {
        let before = self.before;
        // SAFETY: pthread_sigmask is async-signal-safe, and the closure owns what it uses.
        unsafe {
            command.pre_exec(move || {
                match libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, ptr::null_mut()) {
                    0 => Ok(()),
                    error => Err(io::Error::from_raw_os_error(error)),
                }
            });
        }
    }

    /// Waits for one signal. One that is meant for the program is passed on; any may mean that
    /// the program or the pager has ended. Whether it is one that ends programs.
    pub(crate) fn wait_and_forward(&self, child: &Child) -> anyhow::Result<bool> {
        let received = self.next()?;
        if FORWARDED.contains(&received.number) && !received.from_terminal {
            let signal = Signal::from_named_raw(received.number).expect("they have names");
            // It may have ended just now; then it is not reaped yet and takes any signal.
            kill_process(Pid::from_child(child), signal)?;
        }
        if received.number == libc::SIGTSTP {
            stop_self();
        }
        Ok(ENDING.contains(&received.number))
    }

    /// Whether one that ends programs has come meanwhile.
    pub(crate) fn has_ending(&self) -> bool {
        let mut pending = MaybeUninit::uninit();
        // SAFETY: the kernel fills the set in where the call succeeds, and it is read only then.
        unsafe {
            libc::sigpending(pending.as_mut_ptr()) == 0
                && ENDING.iter().any(|signal| libc::sigismember(pending.as_ptr(), *signal) == 1)
        }
    }

    /// Waits for one signal, and says whether it is one that ends programs.
    pub(super) fn wait_for_end(&self) -> bool {
        match self.next() {
            Ok(received) => {
                if received.number == libc::SIGTSTP {
                    stop_self();
                }
                ENDING.contains(&received.number)
            }
            Err(_) => true,
        }
    }

    fn next(&self) -> io::Result<Received> {
        loop {
            let mut info = MaybeUninit::<libc::siginfo_t>::uninit();
            // SAFETY: both point to live values of the right types.
            let number = unsafe { libc::sigwaitinfo(&raw const self.held, info.as_mut_ptr()) };
            if number > 0 {
                // SAFETY: the call succeeded, so the kernel has filled it in.
                let info = unsafe { info.assume_init() };
                return Ok(Received { number, from_terminal: info.si_code == libc::SI_KERNEL });
            }
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
    }
}

#[derive(Debug)]
struct Received {
    number: libc::c_int,
    /// Sent by the kernel: to the whole foreground process group, the program included.
    from_terminal: bool,
}

/// Makes the waiting thread look again, as the end of a child does.
pub(super) fn wake() {
    let _ = kill_process(getpid(), Signal::CHILD);
}

/// Stops like the program, so that the shell sees the job stopped; SIGCONT goes on from here.
fn stop_self() {
    let _ = kill_process(getpid(), Signal::STOP);
}
