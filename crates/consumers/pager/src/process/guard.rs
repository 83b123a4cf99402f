//! Hands the pager's descriptors to the node, so that they outlive the pager.
//!
//! The pager's standard input is a socket to the node. The pager sends duplicates of the state
//! file, of the listening sockets, and of each program's userfaultfd and helper connection. It
//! sends them before the program goes on. If the pager is killed, the node starts another and sends
//! all of them to it ([`crate::process::adopt`]).
//!
//! A descriptor is handed over when it is *sent*: from then on it lives in the socket's queue, and
//! the node empties the queue before it starts another pager. So the pager does not wait for the
//! node here, and a slow or stopped node costs nothing.
//!
//! A node that has died holds nothing. Then the pager goes on unguarded: if it is killed, the
//! helpers in its programs see the connection end, and end the programs. A node that adopts the
//! pager ([`crate::process::lifeline`]) gets all descriptors anew, with the tables locked. Later
//! changes are reported to that node as usual.

use crate::config::{PagerEvent, PagerLeft};
use crate::process::adoption::Answer;
use crate::process::channel::{self, MAX_FDS_PER_LINE};
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::Duration;

/// Timeout of a write to a full socket: the node has not read a hundred lines by then.
const PATIENCE: Duration = Duration::from_secs(2);

/// The label of the state file.
pub(crate) const STATE: &str = "state";
/// The label of the listener at which programs attach.
pub(crate) const LISTENER: &str = "listener";
/// The label of the listener at the abstract address.
pub(crate) const PUBLIC: &str = "public";
/// The label of the control socket.
pub(crate) const CONTROL: &str = "control";

/// The label of the listener to which Firecracker connects.
pub(crate) const FIRECRACKER: &str = "firecracker";

/// The label of a VM's memory file, by the serial number of its hand-over.
pub(crate) fn ram_label(serial: u64) -> String {
    format!("ram-{serial}")
}

/// The label of the userfaultfd of the address space with this serial number.
///
/// It does not use the space's index, which is reused: a label that the node was not told to drop
/// must never name another program's descriptor.
pub(crate) fn uffd_label(serial: u64) -> String {
    format!("uffd-{serial}")
}

/// The label of the connection to the address space's helper.
pub(crate) fn helper_label(serial: u64) -> String {
    format!("helper-{serial}")
}

/// Sends descriptors and events to the node.
pub(crate) struct Guard {
    /// `None` once the node is gone. The stream stays open while the process lives, even if this
    /// descriptor is closed: its end is the node's sign to start another pager.
    node: Mutex<Option<UnixStream>>,
}

impl Guard {
    /// Uses a socket to the node that stays open while this process lives.
    pub(crate) fn new(node: RawFd) -> std::io::Result<Guard> {
        // SAFETY: the caller leaves the descriptor open.
        let stream = unsafe { BorrowedFd::borrow_raw(node) };
        let stream = UnixStream::from(stream.try_clone_to_owned()?);
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Guard { node: Mutex::new(Some(stream)) })
    }

    /// Switches to another node: tells it what it has adopted, and sends all descriptors that it
    /// must hold. The caller must prevent changes of them meanwhile.
    pub(crate) fn hand_over(
        &self,
        stream: UnixStream,
        left: PagerLeft,
        held: &[(String, RawFd)],
    ) -> std::io::Result<()> {
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut node = self.node.lock().expect("no thread panics with it");
        *node = None;
        channel::send(&stream, &Answer::Adopted(left), &[])?;
        for held in held.chunks(MAX_FDS_PER_LINE) {
            let labels = held.iter().map(|(label, _)| label.clone()).collect();
            // SAFETY: the caller has them open.
            let fds = held.iter().map(|&(_, fd)| unsafe { BorrowedFd::borrow_raw(fd) });
            let fds: Vec<_> = fds.collect();
            channel::send(&stream, &PagerEvent::HoldFds(labels), &fds)?;
        }
        *node = Some(stream);
        Ok(())
    }

    /// Hands descriptors over. They replace those that are held under the same labels.
    pub(crate) fn hold(&self, labels: Vec<String>, fds: &[RawFd]) {
        // SAFETY: the caller has them open.
        let fds: Vec<_> = fds.iter().map(|&fd| unsafe { BorrowedFd::borrow_raw(fd) }).collect();
        self.send(&PagerEvent::HoldFds(labels), &fds);
    }

    /// Releases the descriptors of an address space that has ended.
    pub(crate) fn release(&self, serial: u64) {
        self.release_labels(vec![uffd_label(serial), helper_label(serial)]);
    }

    /// Tells the node to drop the descriptors with these labels.
    pub(crate) fn release_labels(&self, labels: Vec<String>) {
        if !labels.is_empty() {
            self.send(&PagerEvent::DropFds(labels), &[]);
        }
    }

    /// Says why the pager is about to end.
    pub(crate) fn say_why(&self, reason: &dyn std::error::Error) {
        let mut words = reason.to_string();
        let mut cause = reason.source();
        while let Some(error) = cause {
            words = format!("{words}: {error}");
            cause = error.source();
        }
        self.send(&PagerEvent::Failed(words), &[]);
    }

    /// Says that the pager is about to end without a failure.
    pub(crate) fn say_over(&self) {
        self.send(&PagerEvent::Over, &[]);
    }

    fn send(&self, event: &PagerEvent, fds: &[BorrowedFd<'_>]) {
        let mut node = self.node.lock().expect("no thread panics with it");
        let Some(stream) = &*node else { return };
        if let Err(error) = channel::send(stream, event, fds) {
            tracing::warn!(
                %error,
                "the node is gone: if the pager is killed now, its programs are ended"
            );
            // Half a line may have been sent: the node would understand nothing that follows.
            *node = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{PagerConfig, PagerStart};
    use std::os::fd::AsRawFd;

    #[test]
    fn a_descriptor_that_was_sent_outlives_its_sender() {
        let (ours, nodes) = UnixStream::pair().expect("a socket pair");
        let mut file = tempfile::tempfile().expect("a file");
        std::io::Write::write_all(&mut file, b"kept").expect("written");
        let guard = Guard::new(ours.as_raw_fd()).expect("a guard");
        guard.hold(vec![uffd_label(7)], &[file.as_raw_fd()]);
        guard.release(6);
        drop((file, guard, ours));

        let mut receiver = channel::Receiver::new(nodes);
        let held = receiver.receive::<PagerEvent>().expect("read");
        assert_eq!(held, Some(PagerEvent::HoldFds(vec!["uffd-7".into()])));
        let mut kept = std::fs::File::from(receiver.take_fds(1).expect("it came").remove(0));
        let mut text = String::new();
        std::io::Seek::rewind(&mut kept).expect("rewound");
        std::io::Read::read_to_string(&mut kept, &mut text).expect("read");
        assert_eq!(text, "kept");
        let dropped = receiver.receive::<PagerEvent>().expect("read");
        assert_eq!(dropped, Some(PagerEvent::DropFds(vec!["uffd-6".into(), "helper-6".into()])));
        assert_eq!(receiver.receive::<PagerEvent>().expect("read"), None);
    }

    #[test]
    fn without_a_node_nothing_happens() {
        let (ours, nodes) = UnixStream::pair().expect("a socket pair");
        drop(nodes);
        let guard = Guard::new(ours.as_raw_fd()).expect("a guard");
        for _ in 0..2 {
            guard.hold(vec![STATE.into()], &[0]);
            guard.release(1);
        }
    }

    #[test]
    fn another_node_is_handed_all_of_it_and_told_what_changes() {
        let (first, nodes) = UnixStream::pair().expect("a socket pair");
        let guard = Guard::new(first.as_raw_fd()).expect("a guard");
        drop(nodes);
        guard.release(1);
        let (ours, nodes) = UnixStream::pair().expect("a socket pair");
        let file = tempfile::tempfile().expect("a file");
        let many = 2 * MAX_FDS_PER_LINE + 3;
        let held: Vec<_> = (0..many).map(|i| (uffd_label(i as u64), file.as_raw_fd())).collect();
        let reader = std::thread::spawn(move || {
            let mut receiver = channel::Receiver::new(nodes);
            let answer = receiver.receive::<Answer<PagerLeft>>().expect("read").expect("said");
            let Answer::Adopted(left) = answer else { panic!("{answer:?}") };
            let mut labels = Vec::new();
            while labels.len() < left.start.held {
                let event = receiver.receive().expect("read").expect("said");
                let PagerEvent::HoldFds(more) = event else { panic!("{event:?}") };
                receiver.take_fds(more.len()).expect("they came");
                labels.extend(more);
            }
            let event = receiver.receive().expect("read");
            assert_eq!(event, Some(PagerEvent::DropFds(vec!["uffd-6".into(), "helper-6".into()])));
            labels
        });
        let left = PagerLeft {
            start: PagerStart { config: config(), held: many },
            restarts: 2,
            launch_over: false,
            leaving: false,
        };
        guard.hand_over(ours, left, &held).expect("handed over");
        guard.release(6);
        let labels = reader.join().expect("joined");
        assert!(labels.into_iter().eq(held.into_iter().map(|(label, _)| label)));
    }

    fn config() -> PagerConfig {
        PagerConfig::new("a".into(), 1, 1 << 24, "/nowhere".into())
    }
}
