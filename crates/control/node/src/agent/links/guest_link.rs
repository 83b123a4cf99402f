//! A machine's port to the manager inside it, on a thread of its own: it waits for the guest, and
//! nobody waits for it.

use crate::agent::Shared as Agent;
use crate::agent::links::notices::Notices;
use crate::stop::Stop;
use hecaton_vm::guest_port::{GuestMessage, HostMessage, Lines, line};
use hecaton_vm::memory_device::MemoryDevice;
use rustix::net::{SendFlags, send};
use std::io::{self, ErrorKind, Read as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// How often it is tried to connect, and looked whether this is to end.
const INTERVAL: Duration = Duration::from_secs(1);

/// Between two reads: a guest that talks without end takes no more of a processor than they do.
const PAUSE: Duration = Duration::from_millis(10);

/// The link. The thread ends with it, a second later at most.
#[derive(Debug)]
pub(crate) struct GuestLink(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    socket: PathBuf,
    /// Start of the clock that deadlines are on.
    begun: Instant,
    agent: Arc<Agent>,
    desk: Mutex<Desk>,
    stop: Stop,
}

#[derive(Debug)]
struct Desk {
    notices: Notices,
    /// While somebody in the guest has greeted.
    stream: Option<Arc<UnixStream>>,
}

impl GuestLink {
    /// To the machine whose port is there, or will be. The agent is woken when the guest says what
    /// is waited for.
    pub(crate) fn start(
        socket: PathBuf,
        notices: Notices,
        begun: Instant,
        agent: Arc<Agent>,
    ) -> io::Result<GuestLink> {
        let desk = Mutex::new(Desk { notices, stream: None });
        let shared = Arc::new(Shared { socket, begun, agent, desk, stop: Stop::default() });
        thread::Builder::new().name("agent-guest".into()).spawn({
            let shared = Arc::clone(&shared);
            move || shared.run()
        })?;
        Ok(GuestLink(shared))
    }

    /// See [`Notices::look`].
    pub(crate) fn look(&self, base_bytes: u64, devices: &[MemoryDevice]) {
        self.0.desk().notices.look(base_bytes, devices);
    }

    /// See [`Notices::shrink`].
    pub(crate) fn shrink(
        &self,
        device: &str,
        target_bytes: u64,
        base_bytes: u64,
        devices: &[MemoryDevice],
    ) {
        let now = self.0.begun.elapsed();
        let mut desk = self.0.desk();
        let told = desk.notices.shrink(device, target_bytes, base_bytes, devices, now);
        desk.say(told);
    }

    /// See [`Notices::grow`].
    pub(crate) fn grow(&self, device: &str) {
        let mut desk = self.0.desk();
        let told = desk.notices.grow(device);
        desk.say(told);
    }

    /// See [`Notices::warn`].
    pub(crate) fn warn(&self, deadline: Duration) {
        let now = self.0.begun.elapsed();
        let mut desk = self.0.desk();
        let told = desk.notices.warn(deadline, now);
        desk.say(told);
    }

    /// See [`Notices::spare`].
    pub(crate) fn spare(&self) {
        let mut desk = self.0.desk();
        let told = desk.notices.spare();
        desk.say(told);
    }

    /// See [`Notices::may_take`].
    pub(crate) fn may_take(&self, size_bytes: u64) -> bool {
        let now = self.0.begun.elapsed();
        self.0.desk().notices.may_take(size_bytes, now)
    }

    /// See [`Notices::listens`].
    pub(crate) fn listens(&self) -> bool {
        self.0.desk().notices.listens()
    }

    /// See [`Notices::takes_reminder`].
    pub(crate) fn takes_reminder(&self) -> bool {
        let now = self.0.begun.elapsed();
        self.0.desk().notices.takes_reminder(now)
    }
}

impl Drop for GuestLink {
    fn drop(&mut self) {
        self.0.stop.set();
    }
}

impl Desk {
    /// Says it, if somebody listens; nobody is waited for, whatever QEMU does with its socket.
    fn say(&mut self, messages: impl IntoIterator<Item = HostMessage>) {
        for message in messages {
            let Some(stream) = &self.stream else { return };
            let text = line(&message);
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            if send(stream, text.as_bytes(), flags) != Ok(text.len()) {
                // It greets again, and is told what is so then.
                let _ = stream.shutdown(Shutdown::Both);
                self.stream = None;
            }
        }
    }
}

impl Shared {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().expect("no thread panics with the desk")
    }

    fn run(&self) {
        while !self.stop.wait(INTERVAL) {
            if let Err(error) = self.listen(&self.socket) {
                tracing::debug!(socket = %self.socket.display(), %error, "a guest's port is silent");
            }
            let mut desk = self.desk();
            desk.stream = None;
            desk.notices.is_lost();
        }
    }

    /// Until QEMU ends the connection, or this ends.
    fn listen(&self, socket: &Path) -> io::Result<()> {
        let stream = Arc::new(UnixStream::connect(socket)?);
        stream.set_read_timeout(Some(INTERVAL))?;
        let mut lines = Lines::default();
        let mut bytes = [0; 4096];
        while !self.stop.wait(PAUSE) {
            match (&*stream).read(&mut bytes) {
                Ok(0) => return Ok(()),
                Ok(count) => lines.take(&bytes[..count]),
                // A child of the node that ends interrupts a read that has a timeout.
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
                {
                    continue;
                }
                Err(error) => return Err(error),
            }
            while let Some(message) = lines.next_message() {
                match message {
                    Ok(message) => self.take(&message, &stream),
                    Err(error) => {
                        tracing::debug!(socket = %socket.display(), error, "a guest says what is no message");
                    }
                }
            }
        }
        Ok(())
    }

    fn take(&self, message: &GuestMessage, stream: &Arc<UnixStream>) {
        let now = self.begun.elapsed();
        let mut desk = self.desk();
        desk.stream = Some(Arc::clone(stream));
        let is_awaited = desk.notices.is_awaited(message);
        let told = desk.notices.hear(message, now);
        desk.say(told);
        drop(desk);
        let socket = self.socket.display();
        match is_awaited {
            true => {
                tracing::info!(%socket, ?message, "a guest says");
                self.agent.bell.ring();
            }
            // It may say so without end.
            false => tracing::debug!(%socket, ?message, "a guest says"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hecaton_testkit::patience;
    use hecaton_vm::guest_port::Notice;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixListener;

    /// Far longer than anything here takes.
    const LONG: Duration = Duration::from_secs(600);

    fn hear(guest: &mut BufReader<UnixStream>) -> HostMessage {
        let mut text = String::new();
        guest.read_line(&mut text).expect("something in time");
        serde_json::from_str(&text).expect("a message")
    }

    #[test]
    fn a_guest_that_greets_hears_what_is_so_and_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("a.guest");
        let agent = Arc::new(Agent::default());
        let link = GuestLink::start(
            socket.clone(),
            Notices::new(Some(LONG)),
            Instant::now(),
            Arc::clone(&agent),
        )
        .expect("started");
        // QEMU is not there yet; then it is, and nobody in the guest.
        link.warn(LONG);
        let qemu = UnixListener::bind(&socket).unwrap();
        let mut guest = BufReader::new(qemu.accept().unwrap().0);
        guest.get_ref().set_read_timeout(Some(patience())).unwrap();
        link.spare();
        link.shrink("d", 4, 10, &[]);
        assert!(link.may_take(0) && !link.listens(), "nobody is there");
        guest.get_mut().write_all(b"nonsense\n").unwrap();
        guest.get_mut().write_all(line(&GuestMessage::Hello).as_bytes()).unwrap();
        let target = HostMessage::Target { id: 2, size_bytes: 10, target_bytes: 10 };
        assert_eq!(hear(&mut guest), target, "nothing of what was before");
        assert_eq!(hear(&mut guest), HostMessage::Cancelled { what: Notice::Evict });
        let ready = |id| GuestMessage::Ready { id, available_bytes: 0, late: Vec::new() };
        guest.get_mut().write_all(line(&ready(2)).as_bytes()).unwrap();
        agent.bell.wait(LONG);
        assert!(link.may_take(0) && link.listens(), "it is ready");
        link.grow("d");
        assert_eq!(hear(&mut guest), HostMessage::Cancelled { what: Notice::Target });
        drop(guest);
        let mut guest = BufReader::new(qemu.accept().expect("it comes again").0);
        guest.get_ref().set_read_timeout(Some(patience())).unwrap();
        guest.get_mut().write_all(line(&GuestMessage::Hello).as_bytes()).unwrap();
        assert_eq!(hear(&mut guest), HostMessage::Cancelled { what: Notice::Target });
        assert_eq!(hear(&mut guest), HostMessage::Cancelled { what: Notice::Evict });
        link.warn(LONG);
        assert!(matches!(hear(&mut guest), HostMessage::Evict { id: 3, .. }));
        drop(link);
        let ended = guest.fill_buf().expect("it ends");
        assert!(ended.is_empty());
    }
}
