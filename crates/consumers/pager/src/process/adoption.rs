//! How a child that has outlived its node is taken over by the next one.
//!
//! A child of the node (a donor, a pager) has a stream to it as its standard input. If the stream
//! ends without a word, the node was killed, and the child goes on with its work. From its start
//! the child listens at a socket in the node's directory. So the next node finds all living
//! children, however soon it starts. Before it takes a port or a name, it knows whether a child has
//! it. The alternative, that children look for a node, was rejected: the node would have to guess
//! how long it must wait for them.
//!
//! The node sends [`Claim`], the child answers [`Answer`], with what it is and its descriptors.
//! From then on the connection replaces the standard input. The child refuses any other peer, and
//! waits on.

use crate::process::channel::{self, Receiver};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The version of the hand-over. Child and node may be of different builds: the node is upgraded
/// while its children run.
pub const VERSION: u32 = 1;

/// How long either side may take for its line.
pub const PATIENCE: Duration = Duration::from_secs(5);

/// That a child outlives its node, and how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outlive {
    /// Where the next node finds it.
    pub socket: PathBuf,
    /// How long it waits for one.
    pub patience: Duration,
}

/// Message of a node that adopts a child.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Claim {
    /// Its version of the hand-over.
    pub adopt: u32,
    /// How long the child is to wait for the node after this one.
    pub patience: Duration,
}

/// Answer of a child to a [`Claim`].
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer<T> {
    /// It is the node's child, and this is what it is.
    Adopted(T),
    /// It is not, and why.
    Refused(String),
}

/// Where a child waits for the next node.
#[derive(Debug)]
pub struct AdoptionSocket {
    listener: UnixListener,
    outlive: Outlive,
}

/// A child's stream to the node that has just adopted it, and what comes on it.
#[derive(Debug)]
pub struct NodeStream {
    /// To write to.
    pub stream: UnixStream,
    /// To read from.
    pub receiver: Receiver,
}

impl AdoptionSocket {
    /// Listens, in the place of the process before this one, if that was killed.
    pub fn listen(outlive: &Outlive) -> io::Result<AdoptionSocket> {
        match fs::remove_file(&outlive.socket) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&outlive.socket)?;
        listener.set_nonblocking(true)?;
        Ok(AdoptionSocket { listener, outlive: outlive.clone() })
    }

    /// How the child outlives the node that it has now.
    pub fn outlive(&self) -> &Outlive {
        &self.outlive
    }

    /// Waits for a node; `None` when none has come within `patience`; for ever without one.
    pub fn wait(&mut self, patience: Option<Duration>) -> io::Result<Option<NodeStream>> {
        let deadline = patience.and_then(|patience| Instant::now().checked_add(patience));
        while self.is_called(deadline)? {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error),
            };
            match admit(stream) {
                Ok((claim, node)) => {
                    self.outlive.patience = claim.patience;
                    return Ok(Some(node));
                }
                // Among others, a node that was killed in its turn before it was heard.
                Err(error) => tracing::debug!(%error, "no node has come, but somebody else"),
            }
        }
        Ok(None)
    }

    /// Waits until somebody connects; false when the time is up.
    fn is_called(&self, deadline: Option<Instant>) -> io::Result<bool> {
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut polled = [PollFd::new(&self.listener, PollFlags::IN)];
            match poll(&mut polled, left.as_ref()) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

impl Drop for AdoptionSocket {
    fn drop(&mut self) {
        // On failure the next process removes it, like the socket of a killed process.
        let _ = fs::remove_file(&self.outlive.socket);
    }
}

fn admit(stream: UnixStream) -> io::Result<(Claim, NodeStream)> {
    channel::check_peer(&stream)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut receiver = Receiver::new(stream.try_clone()?);
    let claim: Option<Claim> = receiver.receive()?;
    let claim = claim.ok_or(io::ErrorKind::UnexpectedEof)?;
    if claim.adopt != VERSION {
        let reason = format!(
            "it hands itself over by version {VERSION}, and the node adopts by version {}",
            claim.adopt
        );
        channel::send(&stream, &Answer::<()>::Refused(reason.clone()), &[])?;
        return Err(io::Error::other(reason));
    }
    stream.set_read_timeout(None)?;
    Ok((claim, NodeStream { stream, receiver }))
}

/// Whether somebody listens at a child's socket. If not, the child was killed, or has ended.
pub fn is_listened_to(socket: &Path) -> bool {
    // Accepted when the child has lost its node, and found to be closed.
    UnixStream::connect(socket).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn socket(dir: &tempfile::TempDir) -> AdoptionSocket {
        let patience = Duration::from_secs(3600);
        let outlive = Outlive { socket: dir.path().join("child.sock"), patience };
        AdoptionSocket::listen(&outlive).expect("listens")
    }

    fn claim(path: &Path, adopt: u32) -> UnixStream {
        let stream = UnixStream::connect(path).expect("connected");
        let claim = Claim { adopt, patience: Duration::from_secs(7) };
        channel::send(&stream, &claim, &[]).expect("said");
        stream
    }

    #[test]
    fn a_node_is_heard_though_it_came_before_the_wait() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut socket = socket(&dir);
        let _node = claim(&socket.outlive.socket, VERSION);
        assert!(socket.wait(None).expect("waited").is_some());
        assert_eq!(socket.outlive().patience, Duration::from_secs(7));
    }

    #[test]
    fn strangers_and_other_versions_are_passed_over() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut socket = socket(&dir);
        let path = socket.outlive.socket.clone();
        assert!(is_listened_to(&path));
        let mut stranger = UnixStream::connect(&path).expect("connected");
        stranger.write_all(b"GET / HTTP/1.1\n").expect("said");
        let old = claim(&path, VERSION + 1);
        let _node = claim(&path, VERSION);
        assert!(socket.wait(None).expect("waited").is_some());
        let answer: Option<Answer<()>> = Receiver::new(old).receive().expect("answered");
        let Some(Answer::Refused(reason)) = answer else { panic!("{answer:?}") };
        assert!(reason.contains(&format!("version {}", VERSION + 1)), "{reason}");
    }

    #[test]
    fn the_wait_ends_and_the_socket_with_it() {
        let dir = tempfile::tempdir().expect("a directory");
        let mut socket = socket(&dir);
        assert!(socket.wait(Some(Duration::ZERO)).expect("waited").is_none());
        let path = socket.outlive.socket.clone();
        drop(socket);
        assert!(!path.exists() && !is_listened_to(&path));
    }

    #[test]
    fn the_socket_of_a_killed_process_is_taken_over() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("child.sock");
        drop(UnixListener::bind(&path).expect("bound"));
        assert!(path.exists() && !is_listened_to(&path));
        let outlive = Outlive { socket: path.clone(), patience: Duration::ZERO };
        let _socket = AdoptionSocket::listen(&outlive).expect("listens");
        assert!(is_listened_to(&path));
    }
}
