//! Adopts the children of a killed node: the node's side of [`hecaton_pager::adoption`].
//!
//! The node adopts each child that answers with its description. It leaves alone a child that
//! refuses or does not answer, and names it in an error. Such a child may hold the only copy of a
//! consumer's memory.

use crate::channel::{self, Receiver};
use crate::children::child::{AdoptedChild, Conversation, Running};
use hecaton_pager::adoption::{Answer, Claim, PATIENCE, VERSION};
use rustix::process::Pid;
use serde::de::DeserializeOwned;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a child that has hung up may take until it has ended.
const END_PATIENCE: Duration = Duration::from_secs(2);

/// A child that has been taken over.
#[derive(Debug)]
pub(crate) struct Adopted<T> {
    /// The child. It first sends the descriptors that belong to `word`. The time limit of the
    /// child's answer holds for each of these too, until [`Adopted::settled`].
    pub(crate) child: Conversation,
    /// The child's description of itself.
    pub(crate) word: T,
}

/// Why a child that is there is not taken over.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// It does not want to be.
    #[error(
        "process {pid}, which a node before this one has left at {socket}, is not taken over: \
         {reason}"
    )]
    Refused {
        /// The child.
        pid: u32,
        /// Where it listens.
        socket: PathBuf,
        /// In its own words.
        reason: String,
    },
    /// It does not answer: stopped, most likely.
    #[error(
        "process {pid}, which a node before this one has left at {socket}, does not answer; let it \
         go on, or kill it and lose what it holds"
    )]
    Silent {
        /// The child.
        pid: u32,
        /// Where it listens.
        socket: PathBuf,
        /// I/O error of the exchange.
        source: io::Error,
    },
    /// It cannot be reached at all.
    #[error("cannot tell who listens at {socket}")]
    Unreachable {
        /// The socket.
        socket: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
}

impl<T> Adopted<T> {
    /// All of it has come: from now on the child may be silent for as long as it likes.
    pub(crate) fn settled(self) -> io::Result<(Conversation, T)> {
        self.child.stream.set_read_timeout(None)?;
        Ok((self.child, self.word))
    }
}

/// Takes over the child that listens at `socket`. `None` if nobody does, or the child was killed at
/// this very moment: then what it had not handed over is lost with it.
pub(crate) fn adopt<T: DeserializeOwned>(
    socket: &Path,
    patience: Duration,
) -> Result<Option<Adopted<T>>, AdoptError> {
    let unreachable = |source| AdoptError::Unreachable { socket: socket.to_owned(), source };
    let stream = match UnixStream::connect(socket) {
        Ok(stream) => stream,
        Err(error) if is_nobody(&error) => return Ok(None),
        Err(error) => return Err(unreachable(error)),
    };
    let pid = channel::check_peer(&stream).map_err(unreachable)?;
    let process = match AdoptedChild::open(pid) {
        Ok(process) => process,
        // It has ended since it was connected to.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()) => {
            return Ok(None);
        }
        Err(error) => return Err(unreachable(error)),
    };
    match converse(&stream, patience) {
        Ok((receiver, Answer::Adopted(word))) => {
            let child = Conversation { process: Running::Adopted(process), stream, receiver };
            Ok(Some(Adopted { child, word }))
        }
        Ok((_, Answer::Refused(reason))) => {
            Err(AdoptError::Refused { pid: number(pid), socket: socket.to_owned(), reason })
        }
        Err(_) if process.wait_for(Some(END_PATIENCE)).unwrap_or(false) => Ok(None),
        Err(source) => {
            Err(AdoptError::Silent { pid: number(pid), socket: socket.to_owned(), source })
        }
    }
}

fn converse<T: DeserializeOwned>(
    stream: &UnixStream,
    patience: Duration,
) -> io::Result<(Receiver, Answer<T>)> {
    stream.set_read_timeout(Some(PATIENCE))?;
    channel::send(stream, &Claim { adopt: VERSION, patience }, &[])?;
    let mut receiver = Receiver::new(stream.try_clone()?);
    let answer = receiver.receive()?.ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok((receiver, answer))
}

/// Nobody listens there, or there is no such socket.
fn is_nobody(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
}

fn number(pid: Pid) -> u32 {
    pid.as_raw_nonzero().get().unsigned_abs()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread;

    /// Adopts a child in this process that does `what` with the connection. Returns the error.
    fn adopt_from(what: impl FnOnce(UnixStream) + Send + 'static) -> Option<AdoptError> {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("child.sock");
        let listener = UnixListener::bind(&path).expect("bound");
        let child = thread::spawn(move || what(listener.accept().expect("connected").0));
        let adopted = adopt::<u32>(&path, Duration::ZERO);
        child.join().expect("joined");
        adopted.map(|child| assert!(child.is_some())).err()
    }

    fn answer(stream: &UnixStream, answer: &Answer<u32>) {
        let claim: Claim = Receiver::new(stream.try_clone().expect("a descriptor"))
            .receive()
            .expect("read")
            .expect("said");
        assert_eq!(claim.adopt, VERSION);
        channel::send(stream, answer, &[]).expect("said");
    }

    #[test]
    fn who_says_what_it_is_is_adopted() {
        assert!(adopt_from(|stream| answer(&stream, &Answer::Adopted(7))).is_none());
    }

    #[test]
    fn nobody_is_adopted_from_a_socket_that_was_left() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("child.sock");
        assert!(adopt::<u32>(&path, Duration::ZERO).expect("no error").is_none());
        drop(UnixListener::bind(&path).expect("bound"));
        assert!(adopt::<u32>(&path, Duration::ZERO).expect("no error").is_none());
    }

    #[test]
    fn who_refuses_or_says_nothing_known_is_named_and_left_alone() {
        let refused = adopt_from(|stream| answer(&stream, &Answer::Refused("no".to_owned())));
        let refused = refused.expect("an error").to_string();
        let pid = std::process::id().to_string();
        assert!(refused.contains(&pid) && refused.contains("is not taken over: no"), "{refused}");
        let silent = adopt_from(drop).expect("an error").to_string();
        assert!(silent.contains(&pid) && silent.contains("does not answer"), "{silent}");
        let strange = adopt_from(|stream| {
            std::io::Write::write_all(&mut &stream, b"{}\n").expect("said");
        });
        assert!(strange.is_some());
    }
}
