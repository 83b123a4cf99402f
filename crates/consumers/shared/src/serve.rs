//! Answers programs that want files.
//!
//! A thread for each: it takes the rights of the program that asks, and may wait for the disk.

use crate::open::{Place, Rights};
use hecaton_uffd::files::{Answer, Ask};
use rustix::io::Errno;
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, accept_with,
    recv, sendmsg, sockopt,
};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

/// Most questions at a time; others wait in the socket's queue.
const AT_A_TIME: usize = 32;

/// Time for a program to say what it wants.
const PATIENCE: Duration = Duration::from_secs(2);

/// Pause if the system refuses a connection or a thread.
const PAUSE: Duration = Duration::from_millis(10);

/// Most groups of a user.
const MAX_GROUPS: usize = 65_536;

/// Counts the threads that answer.
#[derive(Default)]
struct Busy {
    count: Mutex<usize>,
    fewer: Condvar,
}

/// Answers for as long as the process lives.
pub(crate) fn run(listener: &OwnedFd, place: &Arc<Place>) -> ! {
    let busy = Arc::new(Busy::default());
    loop {
        let Ok(connection) = accept_with(listener, SocketFlags::CLOEXEC) else {
            thread::sleep(PAUSE);
            continue;
        };
        busy.enter();
        let (place, its) = (Arc::clone(place), Arc::clone(&busy));
        let answer = move || {
            if let Err(errno) = answer(&connection, &place) {
                tracing::debug!(%errno, "a program that wants shared memory is gone");
            }
            its.leave();
        };
        if let Err(error) = thread::Builder::new().name("answer".into()).spawn(answer) {
            tracing::warn!(%error, "a program that wants shared memory gets no answer");
            busy.leave();
            thread::sleep(PAUSE);
        }
    }
}

impl Busy {
    fn enter(&self) {
        let count = self.count.lock().expect("no thread panics with it");
        let is_full = |count: &mut usize| *count >= AT_A_TIME;
        *self.fewer.wait_while(count, is_full).expect("no thread panics with it") += 1;
    }

    fn leave(&self) {
        *self.count.lock().expect("no thread panics with it") -= 1;
        self.fewer.notify_one();
    }
}

/// Answers one question. An error: the program is gone.
fn answer(connection: &OwnedFd, place: &Place) -> Result<(), Errno> {
    for way in [sockopt::Timeout::Recv, sockopt::Timeout::Send] {
        sockopt::set_socket_timeout(connection, way, Some(PATIENCE))?;
    }
    let mut bytes = [0; size_of::<Ask>()];
    let (read, _) = recv(connection, &mut bytes, RecvFlags::empty())?;
    let opened = match Ask::parse(&bytes[..read]) {
        Some(ask) => {
            rights_of(connection).and_then(|rights| rights.take()).and_then(|()| place.answer(&ask))
        }
        None => Err(Errno::INVAL),
    };
    let (errno, file) = match opened {
        Ok(file) => (0, file),
        Err(errno) => (errno.raw_os_error(), None),
    };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = file.as_ref().map(AsFd::as_fd);
    if let Some(fd) = &fds {
        ancillary.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd)));
    }
    let answer = Answer::of(errno);
    let bytes = [IoSlice::new(answer.as_bytes())];
    sendmsg(connection, &bytes, &mut ancillary, SendFlags::NOSIGNAL).map(drop)
}

/// The rights of the program at the other end, as of when it connected.
fn rights_of(connection: &OwnedFd) -> Result<Rights, Errno> {
    let peer = sockopt::socket_peercred(connection)?;
    let (user, group) = (peer.uid.as_raw(), peer.gid.as_raw());
    let mut groups = vec![0u32; MAX_GROUPS];
    let mut bytes = size_of_val(&groups[..]) as libc::socklen_t;
    // SAFETY: the kernel writes at most `bytes` bytes.
    let done = unsafe {
        let (fd, to) = (connection.as_raw_fd(), groups.as_mut_ptr().cast());
        libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERGROUPS, to, &raw mut bytes)
    };
    if done != 0 {
        return Err(Errno::PERM);
    }
    groups.truncate(bytes as usize / size_of::<u32>());
    Ok(Rights { user, group, groups })
}
