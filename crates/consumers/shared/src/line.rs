//! Carries the messages between a pager and its keeper: lines of JSON on a stream.
//!
//! The pager sends [`Order::Start`] first, and the keeper answers with [`Report::Ready`] or
//! [`Report::Refused`]. The keeper ends when the stream ends.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

/// Longest line in bytes: 256 runs, and what is around them.
const MAX_LINE: u64 = 64 << 10;

/// From the pager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Order {
    /// Set the file system up, or find it.
    Start(Start),
    /// From now on, so many bytes of files may be in the page cache.
    Limit(u64),
    /// The pages of the [`Report::Unmap`] with this number are in no page table any more, as far as
    /// that can be.
    Unmapped(u64),
}

/// What a keeper needs to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Start {
    /// The consumer whose programs share the memory.
    pub consumer: String,
    /// Its space, which no other consumer has.
    pub space: u64,
    /// The node's control socket.
    pub node: PathBuf,
    /// The path of the record. The volume's file, if it needs one, is this path with `.disk` added.
    pub record: PathBuf,
    /// Bytes of files that may be in the page cache.
    pub limit_bytes: u64,
    /// Copies of each page in the pool.
    pub copies: u8,
    /// The only donors that may be used; all if there are none.
    pub donors: Vec<String>,
    /// How long a donor may be away before reads and writes fail, in seconds.
    pub donor_patience_s: u64,
    /// How long a donor may be silent before other copies take its place, in milliseconds.
    pub failover_ms: u64,
    /// Bytes that donors read in a second to compare copies.
    pub scrub_bytes_per_s: u64,
    /// Bytes that donors copy to each other in a second.
    pub copying_bytes_per_s: u64,
    /// Donors get only encrypted pages.
    pub encrypt: bool,
}

/// From the keeper.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Report {
    /// Files can be had. Their file system is on this device: major and minor number.
    Ready([u32; 2]),
    /// There is no shared memory on this host, for this reason.
    Refused(String),
    /// How things are now.
    Usage(Usage),
    /// Drop these pages from the page tables of all programs. Their contents stay in the page
    /// cache.
    Unmap {
        /// Comes back in [`Order::Unmapped`].
        number: u64,
        /// The pages.
        runs: Vec<FileRun>,
    },
}

/// Use of the page cache.
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Usage {
    /// Bytes of files in the page cache.
    pub resident_bytes: u64,
    /// Bytes read from the disk since this keeper was started.
    pub read_bytes: u64,
    /// Bytes written to it since then.
    pub written_bytes: u64,
}

/// Pages of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRun {
    /// The file's inode number.
    pub node: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Most runs of one [`Report::Unmap`].
pub const MAX_RUNS: usize = 256;

/// Sends a message.
///
/// # Errors
/// Those of the system call: the other side is gone.
pub fn send<M: Serialize>(mut stream: &UnixStream, message: &M) -> io::Result<()> {
    let mut line = serde_json::to_string(message)?;
    line.push('\n');
    stream.write_all(line.as_bytes())
}

/// Receives messages.
pub struct Receiver(BufReader<UnixStream>);

impl Receiver {
    /// Receives from this stream.
    pub fn new(stream: UnixStream) -> Receiver {
        Receiver(BufReader::new(stream))
    }

    /// The next message; `None` when the other side is gone.
    ///
    /// # Errors
    /// A line that is no message, or is too long; and those of the system call.
    pub fn receive<M: DeserializeOwned>(&mut self) -> io::Result<Option<M>> {
        let mut line = String::new();
        self.0.by_ref().take(MAX_LINE).read_line(&mut line)?;
        match line.is_empty() {
            true => Ok(None),
            false => Ok(Some(serde_json::from_str(&line)?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let run = FileRun { node: u64::MAX, offset: u64::MAX, bytes: u64::MAX };
        let unmap = Report::Unmap { number: u64::MAX, runs: vec![run; MAX_RUNS] };
        let sender = std::thread::spawn(move || {
            send(&ours, &unmap).expect("sent");
            send(&ours, &Report::Usage(Usage::default())).expect("sent");
            (&ours).write_all(b"\"nonsense\"\n").expect("sent");
            unmap
        });
        let mut receiver = Receiver::new(theirs);
        let first = receiver.receive::<Report>().expect("a message");
        assert_eq!(receiver.receive().expect("one"), Some(Report::Usage(Usage::default())));
        assert!(receiver.receive::<Report>().is_err());
        assert_eq!(first, Some(sender.join().expect("joined")));
        assert_eq!(receiver.receive::<Report>().expect("its end"), None);
    }
}
