//! Puts *bare* programs on the pool: statically linked, or linked with musl.
//!
//! This process starts the program stopped before its first instruction, and traces it. It maps the
//! library into the program as a dynamic linker does ([`image`]), and calls it. The library
//! attaches to the pager and starts its helper, as in any program. Then this process replaces the
//! system calls that make children ([`sites`]), and detaches, so that debuggers can attach.
//!
//! Rejected: to stay the tracer, which shuts out debuggers and hears of a fork too late;
//! userfaultfd's fork event, which takes CAP_SYS_PTRACE; a second library for bare programs, which
//! would repeat this one's code.

mod image;
mod mappings;
mod sites;
mod tracee;

use anyhow::{Context as _, ensure};
use hecaton_uffd::bare::{MAX_PATH, OWN_ROOM, Place};
use hecaton_uffd::handover::Range;
use image::Image;
use mappings::Mapping;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use tracee::Tracee;

/// A stopped pager does not answer the program.
const PATIENCE: Duration = Duration::from_secs(60);

const PAGE: u64 = 4096;

/// The library, and the settings of the program that will run with it.
pub(super) struct Bare {
    image: Image,
    socket: [u8; MAX_PATH],
    /// The program's signal mask when it begins.
    blocked: libc::sigset_t,
}

impl Bare {
    /// Reads the library, for a program that attaches to the pager at `socket`.
    pub(super) fn new(
        library: &Path,
        socket: &Path,
        blocked: libc::sigset_t,
    ) -> anyhow::Result<Bare> {
        let file =
            fs::read(library).with_context(|| format!("cannot read {}", library.display()))?;
        let image =
            Image::parse(&file).with_context(|| format!("cannot use {}", library.display()))?;
        let path = socket.as_os_str().as_bytes();
        let mut socket = [0; MAX_PATH];
        ensure!(path.len() < MAX_PATH, "the pager's socket path is too long");
        socket[..path.len()].copy_from_slice(path);
        Ok(Bare { image, socket, blocked })
    }

    /// Makes `command` stop before its first instruction. The caller then calls [`Bare::enter`].
    pub(super) fn prepare(&self, command: &mut Command) {
        tracee::stop_at_start(command);
    }

    /// Puts the library into the program, which was just started, and lets the program begin. After
    /// an error the program has ended. Takes [`PATIENCE`] at most.
    pub(super) fn enter(&self, child: &mut Child) -> anyhow::Result<()> {
        let entered = self.enter_in_time(child);
        if entered.is_err() {
            // Fails if the program has ended.
            let _ = child.kill();
            child.wait()?;
        }
        entered.context("the program cannot be put on the pool")
    }

    fn enter_in_time(&self, child: &Child) -> anyhow::Result<()> {
        let limit = Limit::on(child)?;
        let entered = Tracee::at_start(child.id()).and_then(|mut tracee| {
            let place = self.attach(&mut tracee)?;
            follow_forks(&mut tracee, &mappings::read(child.id())?, &place)?;
            tracee.let_go(&self.blocked)
        });
        let seconds = PATIENCE.as_secs();
        ensure!(!limit.has_passed(), "it did not attach within {seconds} s: is its pager stopped?");
        entered
    }

    fn attach(&self, tracee: &mut Tracee) -> anyhow::Result<Place> {
        let image = &self.image;
        // A page is left inaccessible behind the library.
        let room = image.len() + PAGE;
        let len = room + OWN_ROOM;
        let start = map(tracee, 0, len, libc::PROT_NONE, libc::MAP_NORESERVE)?;
        protect(tracee, start, image.len(), libc::PROT_READ | libc::PROT_WRITE)?;
        tracee.write(start, &image.at(start))?;
        for part in image.parts() {
            let (at, len) = (start + part.span.start, part.span.end - part.span.start);
            protect(tracee, at, len, part.protection)?;
        }
        let place = Place {
            reserved: Range { start, len },
            room: start + room,
            socket: self.socket,
            unused: 0,
            follow_clone: 0,
            follow_fork: 0,
        };
        let argument = place.as_bytes().first_chunk().expect("all of it");
        let (place, failed) = tracee.call_function(start + image.enter(), argument)?;
        ensure!(failed == 0, "it does not attach, for the reason above");
        Ok(Place::from_bytes(&place))
    }
}

/// Kills a program that does not attach in time.
struct Limit {
    ended: mpsc::Sender<()>,
    watchdog: JoinHandle<bool>,
}

impl Limit {
    fn on(child: &Child) -> anyhow::Result<Limit> {
        let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
        let (ended, waits) = mpsc::channel();
        let watchdog = thread::Builder::new().name("bare".into()).spawn(move || {
            let is_late = waits.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout);
            if is_late {
                // Fails if the program has ended.
                let _ = pidfd_send_signal(&process, Signal::KILL);
            }
            is_late
        })?;
        Ok(Limit { ended, watchdog })
    }

    /// Ends the limit. True if the program was killed.
    fn has_passed(self) -> bool {
        drop(self.ended);
        self.watchdog.join().expect("the watchdog does not panic")
    }
}

fn map(
    tracee: &mut Tracee,
    at: u64,
    len: u64,
    protection: i32,
    more_flags: i32,
) -> anyhow::Result<u64> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | more_flags;
    let arguments = [at, len, protection as u64, flags as u64, u64::MAX, 0];
    tracee.call(libc::SYS_mmap, arguments).context("cannot map memory in it")
}

fn protect(tracee: &mut Tracee, at: u64, len: u64, protection: i32) -> anyhow::Result<()> {
    let arguments = [at, len, protection as u64, 0, 0, 0];
    tracee.call(libc::SYS_mprotect, arguments).context("cannot protect memory in it")?;
    Ok(())
}

/// Replaces the system calls that make children. A child of a call that is not replaced lacks the
/// memory that may be in the pool (`MADV_DONTFORK`).
fn follow_forks(tracee: &mut Tracee, mappings: &[Mapping], place: &Place) -> anyhow::Result<()> {
    for mapping in mappings.iter().filter(|mapping| mapping.is_text) {
        let start = mapping.span.start;
        let mut text = vec![0; (mapping.span.end - start) as usize];
        tracee.read(start, &mut text)?;
        let found = sites::find(&text);
        let len = found.len() as u64 * sites::STUB;
        let room = mappings::room_below(mappings, start, len).filter(|_| len > 0);
        let Some(room) = room else { continue };
        let executable = libc::PROT_READ | libc::PROT_EXEC;
        map(tracee, room, len, executable, libc::MAP_FIXED_NOREPLACE)?;
        for ((at, call), stub) in found.into_iter().zip((room..).step_by(sites::STUB as usize)) {
            let site = start + at as u64;
            let follow = match call {
                sites::Call::Clone => place.follow_clone,
                sites::Call::Fork => place.follow_fork,
            };
            let code = sites::stub(call, site, stub, follow).zip(sites::patch(site, stub));
            if let Some((code, patch)) = code {
                tracee.write(stub, &code)?;
                tracee.write(site, &patch)?;
            }
        }
    }
    Ok(())
}
