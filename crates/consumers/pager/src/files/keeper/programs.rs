//! Answers programs: opens files for them, with the rights of the program that asks.

use super::names::Mount;
use crate::files::table::MAX_NAME;
use hecaton_uffd::files::{Answer, Ask, AskKind};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{AtFlags, Mode, OFlags, ftruncate, openat, unlinkat};
use rustix::io::Errno;
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, accept_with,
    recv, sendmsg, sockopt,
};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Programs that are answered at a time, by one thread each. Others wait.
const MAX_ASKING: usize = 256;

/// Time for a program to send its question after it has connected.
const PATIENCE: Duration = Duration::from_secs(5);

/// Answers programs that connect to `listener`, for ever.
pub(super) fn answer_all(listener: &OwnedFd, mount: &Arc<Mount>) {
    let asking = Arc::new(AtomicUsize::new(0));
    loop {
        answer_next(listener, mount, &asking);
    }
}

/// Accepts one program, and answers it in a thread of its own.
fn answer_next(listener: &OwnedFd, mount: &Arc<Mount>, asking: &Arc<AtomicUsize>) {
    let mut polled = [PollFd::new(listener, PollFlags::IN)];
    let came = poll(&mut polled, None).and_then(|_| accept_with(listener, SocketFlags::CLOEXEC));
    let program = match came {
        Ok(program) => program,
        // The program is gone again.
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return,
        Err(_) => return std::thread::sleep(Duration::from_millis(10)),
    };
    while asking.load(Relaxed) >= MAX_ASKING {
        std::thread::sleep(Duration::from_millis(1));
    }
    asking.fetch_add(1, Relaxed);
    let (mount, counted) = (Arc::clone(mount), Arc::clone(asking));
    let spawned = std::thread::Builder::new().spawn(move || {
        answer(&program, &mount);
        counted.fetch_sub(1, Relaxed);
    });
    if spawned.is_err() {
        // The program finds its connection closed, and asks again.
        asking.fetch_sub(1, Relaxed);
    }
}

fn answer(program: &OwnedFd, mount: &Mount) {
    let _ = sockopt::set_socket_timeout(program, sockopt::Timeout::Recv, Some(PATIENCE));
    let mut bytes = [0u8; size_of::<Ask>()];
    let Ok((read, _)) = recv(program, &mut bytes, RecvFlags::empty()) else { return };
    let Some(ask) = Ask::parse(&bytes[..read]) else { return };
    let Ok(peer) = sockopt::socket_peercred(program) else { return };
    let user = peer.uid.as_raw();
    become_user(user, peer.gid.as_raw());
    let done = do_for(mount, &ask, user);
    let answer = match &done {
        Ok(_) => Answer::of(0),
        Err(errno) => Answer::of(errno.raw_os_error()),
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let file = done.ok().flatten();
    let fds: Vec<_> = file.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let parts = [IoSlice::new(answer.as_bytes())];
    // Never waits for the program: it may have ended.
    let _ = sendmsg(program, &parts, &mut ancillary, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

/// Gives files that this thread makes to this user and group.
fn become_user(user: u32, group: u32) {
    // SAFETY: numbers only; both calls change the calling thread alone.
    unsafe {
        libc::syscall(libc::SYS_setfsgid, group);
        libc::syscall(libc::SYS_setfsuid, user);
    }
}

/// Answers the question of a program. Returns the file that it opens, if it opens one.
fn do_for(mount: &Mount, ask: &Ask, user: u32) -> Result<Option<OwnedFd>, Errno> {
    let make = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    let named = |prefix: String| {
        let mut name = prefix.into_bytes();
        name.extend_from_slice(ask.name());
        name.truncate(MAX_NAME);
        name
    };
    match ask.kind().ok_or(Errno::INVAL)? {
        AskKind::Anonymous => {
            let file = mount.open_once(b"shared:memory", make, Mode::from_raw_mode(0o600))?;
            ftruncate(&file, ask.bytes)?;
            Ok(Some(file))
        }
        AskKind::MemoryFile => {
            let name = named("memfd:".into());
            mount.open_once(&name, make, Mode::from_raw_mode(0o777)).map(Some)
        }
        AskKind::Open => {
            let known = OFlags::ACCMODE | OFlags::CREATE | OFlags::EXCL | OFlags::TRUNC;
            let flags = OFlags::from_bits_retain(ask.flags) & known | OFlags::CLOEXEC;
            let name = named(format!("{user}:"));
            let mode = Mode::from_raw_mode(ask.mode & 0o7777);
            openat(&mount.directory, &name[..], flags, mode).map(Some)
        }
        AskKind::Unlink => {
            let name = named(format!("{user}:"));
            unlinkat(&mount.directory, &name[..], AtFlags::empty()).map(|()| None)
        }
    }
}
