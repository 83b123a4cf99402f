//! Lets programs in that cannot reach the pager by the path of its socket.
//!
//! They have become another user, or no longer see it. Everybody in the host's network namespace
//! can connect to an abstract address. So a thread of its own hears who comes there, and gives to
//! the fault loop only connections on which the consumer's key was shown.

use crate::config::PagerConfig;
use crate::programs::attach;
use hecaton_uffd::handover::{Answer, Door, Key, Knock, MAGIC, Step, Wish};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::thread;
use std::time::{Duration, Instant};

/// Most connections on which nothing was said yet. More wait to be accepted.
const MAX_WAITING: usize = 64;

/// How long to wait for descriptors. Connections that were accepted are heard meanwhile.
const RETRY: Duration = Duration::from_millis(10);

/// How long one of them may say nothing.
const PATIENCE: Duration = Duration::from_secs(2);

/// Listens at the abstract address. Without a key, or where that fails, such programs stay on local
/// memory.
pub(crate) fn listen(config: &PagerConfig) -> Option<RawFd> {
    let door = Door::of(config.key.as_bytes())?;
    let bind = || -> rustix::io::Result<RawFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::SEQPACKET;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        let address = SocketAddrUnix::new_abstract_name(&door.name)?;
        rustix::net::bind(&socket, &address)?;
        rustix::net::listen(&socket, 128)?;
        Ok(socket.into_raw_fd())
    };
    let bound = bind();
    if let Err(error) = &bound {
        tracing::warn!(%error, "programs that become another user stay on local memory");
    }
    bound.ok()
}

/// Admits programs as long as the process lives: calls `admit` with the connections on which they
/// say [`hecaton_uffd::handover::Attach`] next.
pub(crate) fn begin(
    listener: RawFd,
    key: Key,
    admit: impl Fn(OwnedFd) + Send + 'static,
) -> io::Result<()> {
    let mut entrance = Entrance { listener, key, admit, waiting: Vec::new(), is_full: false };
    let admits = move || {
        while let Ok(()) = entrance.hear() {}
        tracing::error!("programs that become another user are not heard any more");
    };
    thread::Builder::new().name("pager-admission".into()).spawn(admits).map(drop)
}

struct Entrance<Admit> {
    listener: RawFd,
    key: Key,
    admit: Admit,
    waiting: Vec<Waiting>,
    /// The last accept failed: the process has no descriptors left.
    is_full: bool,
}

/// Somebody who has not said anything yet.
struct Waiting {
    socket: OwnedFd,
    since: Instant,
}

impl<Admit: Fn(OwnedFd)> Entrance<Admit> {
    /// Waits until somebody comes, speaks, or has been silent for too long.
    fn hear(&mut self) -> rustix::io::Result<()> {
        let left = self.waiting.first().map(|first| PATIENCE.saturating_sub(first.since.elapsed()));
        let left = left.into_iter().chain(self.is_full.then_some(RETRY)).min();
        let limit = left.map(|left| Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: i64::from(left.subsec_nanos()),
        });
        // SAFETY: it is never closed.
        let listener = unsafe { BorrowedFd::borrow_raw(self.listener) };
        let listens = self.waiting.len() < MAX_WAITING && !self.is_full;
        let listener = listens.then_some(listener);
        let watched = self.waiting.iter().map(|one| one.socket.as_fd()).chain(listener);
        let polled = watched.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let mut polled: Vec<_> = polled.collect();
        match poll(&mut polled, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        let spoke: Vec<bool> = polled.iter().map(|one| !one.revents().is_empty()).collect();
        drop(polled);
        let mut spoke = spoke.into_iter();
        for one in std::mem::take(&mut self.waiting) {
            if spoke.next() == Some(true) {
                self.answer(one.socket);
            } else if one.since.elapsed() < PATIENCE {
                self.waiting.push(one);
            }
        }
        let has_come = spoke.next() == Some(true);
        let before = self.waiting.len();
        while self.waiting.len() < MAX_WAITING
            && let Some(socket) = attach::accept(self.listener)
        {
            // SAFETY: just opened, and nobody else's.
            let socket = unsafe { OwnedFd::from_raw_fd(socket) };
            self.waiting.push(Waiting { socket, since: Instant::now() });
        }
        // The listener stays readable: it is left out of the next wait, which is short.
        self.is_full = has_come && self.waiting.len() == before;
        Ok(())
    }

    /// Somebody has spoken, or hung up. Descriptors that came along are closed by the kernel.
    fn answer(&self, socket: OwnedFd) {
        let mut bytes = [0u8; size_of::<Knock>()];
        let heard = rustix::net::recv(&socket, &mut bytes, RecvFlags::DONTWAIT);
        // SAFETY: any bytes are a valid Knock.
        let knock = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast::<Knock>()) };
        let is_whole = heard.is_ok_and(|(_, length)| length == bytes.len());
        if !is_whole || knock.magic != MAGIC || knock.key != self.key {
            return tracing::debug!("somebody came who does not show the consumer's key");
        }
        if knock.wish == Wish::Attach as u32 {
            return (self.admit)(socket);
        }
        if let Err(error) = give_device(&socket) {
            tracing::warn!(%error, "a program that is another user's stays on local memory");
        }
    }
}

/// Gives `/dev/userfaultfd` to a program that may not open it.
fn give_device(socket: &OwnedFd) -> io::Result<()> {
    let answer = |step| Answer::new(step);
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let device = match std::fs::File::options().read(true).write(true).open(DEVICE) {
        Ok(device) => device,
        Err(error) => {
            // An error means that it has ended.
            let _ = rustix::net::send(socket, answer(Step::Refused).as_bytes(), flags);
            return Err(error);
        }
    };
    let given = [device.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&given));
    let answer = answer(Step::Go);
    rustix::net::sendmsg(socket, &[IoSlice::new(answer.as_bytes())], &mut ancillary, flags)?;
    Ok(())
}

const DEVICE: &str = "/dev/userfaultfd";

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_testkit::patience;
    use rustix::net::{connect, recv, send, socket_with};
    use std::sync::mpsc;

    const KEY: &str = "00112233445566770123456789abcdeffedcba9876543210";

    fn program(config: &PagerConfig) -> OwnedFd {
        let door = Door::of(config.key.as_bytes()).unwrap();
        let address = SocketAddrUnix::new_abstract_name(&door.name).unwrap();
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let program = socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        connect(&program, &address).unwrap();
        program
    }

    #[test]
    fn only_who_shows_the_key_gets_anything() {
        let mut config = PagerConfig::new("a".into(), 1, 1 << 30, "socket".into());
        assert_eq!(listen(&config), None, "without a key");
        config.key = KEY.into();
        let listener = listen(&config).unwrap();
        assert_eq!(listen(&config), None, "somebody listens there");
        let key = Door::of(KEY.as_bytes()).unwrap().key;
        let (admitted, came) = mpsc::channel();
        begin(listener, key, move |socket| admitted.send(socket).unwrap()).unwrap();
        // They say nothing: the others wait until they are sent away.
        let silent: Vec<_> = (0..MAX_WAITING).map(|_| program(&config)).collect();
        let says = |key: Key, wish: Wish| {
            let program = program(&config);
            let knock = Knock { magic: MAGIC, wish: wish as u32, key };
            send(&program, knock.as_bytes(), SendFlags::NOSIGNAL).unwrap();
            program
        };
        let hears = |program: &OwnedFd| recv(program, &mut [0; 64], RecvFlags::empty()).unwrap().1;
        let wrong = says([key[0], key[1] + 1], Wish::Attach);
        assert_eq!(hears(&wrong), 0, "it hangs up");
        assert_eq!(hears(&silent[0]), 0);
        let answer = hears(&says(key, Wish::Device));
        assert_eq!(answer, size_of::<Answer>());
        let right = says(key, Wish::Attach);
        let socket = came.recv_timeout(patience()).unwrap();
        send(&right, b"attach", SendFlags::NOSIGNAL).unwrap();
        assert_eq!(hears(&socket), b"attach".len());
        assert!(came.try_recv().is_err(), "nobody else");
    }
}
