//! Copies pages from another donor's extent: how a group gets a new member, and how a member's
//! damaged pages are mended, without the borrower's host carrying them.
//!
//! The other donor is asked as a borrower asks it, for the space and with the epoch of the
//! connection that the fill came over, so that a borrower that has been replaced cannot have
//! anything copied. Where nodes have certificates this donor shows its own node's, which the
//! borrower has had admitted there ([`Request::Admit`]).
//!
//! A page that does not match its sum is asked for once more. If it does not match then either, it
//! is stored as it came, with the sum that it should have: the borrower will see that it is
//! damaged, which the other extent's copy is as well.

use hecaton_memory::{PAGE_SIZE, PageSum, page_sum};
use hecaton_transport::client::{Connection, ConnectionError, Event, Options};
use hecaton_transport::protocol::{FillSource, Hello, MAX_PAGES, Refusal, Request};
use hecaton_transport::tls::{CredentialsDir, Destination, Tls};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use tracing::debug;

/// Takes pages that follow one another, with the number of the first one.
type Store<'a> = dyn FnMut(u32, &[PageSum], &[u8]) -> Result<(), Refusal> + 'a;

/// How long the other donor may be silent.
const PATIENCE: Duration = Duration::from_secs(2);

/// Identity that this donor shows to another donor.
pub(crate) struct Introduction {
    /// As the borrower that wants the copy.
    pub(crate) hello: Hello,
    /// As this donor's node, where connections are protected.
    pub(crate) credentials: Option<Arc<CredentialsDir>>,
}

/// A connection to another donor, kept for the next run of pages.
pub(crate) struct Source {
    address: SocketAddr,
    boot: u64,
    connection: Connection,
}

impl Source {
    /// Connects to the donor of an extent, as the space that the introduction names. Which node it
    /// is of, the borrower does not say: it is known by the number of its life, which only a donor
    /// and its borrowers know.
    fn open(source: &FillSource, introduction: &Introduction) -> Result<Source, ConnectionError> {
        let options = Options { connect: PATIENCE, ..Options::default() };
        let tls = introduction.credentials.clone();
        let tls = tls.map(|credentials| Tls { credentials, node: None });
        let to = Destination { address: source.address, tls };
        let connection = Connection::open(to, &introduction.hello, &options)?;
        let boot = connection.welcome().map_or(0, |welcome| welcome.boot);
        Ok(Source { address: source.address, boot, connection })
    }

    /// Reads a run of pages, in order, and hands them to `sink` in pieces.
    fn read(
        &mut self,
        source: &FillSource,
        first: u32,
        count: u32,
        sink: &mut Store<'_>,
    ) -> Result<(), Interrupted> {
        let (mut asked, mut given) = (0, 0);
        while given < count {
            let pages: Vec<u32> =
                (first + asked..first + count.min(asked + MAX_PAGES as u32)).collect();
            let request = Request::Read { extent: source.extent, pages: &pages };
            if !pages.is_empty() && self.connection.has_room(&request) {
                self.connection.submit(u64::from(pages[0]), request, &[])?;
                asked += pages.len() as u32;
                continue;
            }
            if !self.connection.has_undelivered() {
                self.wait()?;
            }
            let mut outcome = Ok(());
            self.connection.progress(&mut |tag, event| match event {
                Event::Pages { from, sums, data } if outcome.is_ok() => {
                    given += sums.len() as u32;
                    outcome = sink(tag as u32 + from as u32, sums, data);
                }
                Event::Refused(_) => outcome = Err(Refusal::NoSource),
                // Pages that come after a failure; no other answers are asked for.
                _ => {}
            })?;
            outcome.map_err(Interrupted::Refused)?;
        }
        Ok(())
    }

    fn wait(&self) -> Result<(), Interrupted> {
        let mut fds = [PollFd::from_borrowed_fd(self.connection.as_fd(), PollFlags::IN)];
        let limit = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
        match poll(&mut fds, Some(&limit)) {
            Ok(0) => Err(ConnectionError::TimedOut("answer", PATIENCE).into()),
            // Interrupted: the caller looks for itself.
            _ => Ok(()),
        }
    }
}

/// Why a run was not read to its end.
enum Interrupted {
    Connection(ConnectionError),
    Refused(Refusal),
}

impl From<ConnectionError> for Interrupted {
    fn from(error: ConnectionError) -> Interrupted {
        Interrupted::Connection(error)
    }
}

/// Copies `count` pages from `first` on. `kept` is the connection of an earlier copy, which is used
/// again if it leads to the same donor; `store` takes the pages, with the number of the first one.
pub(crate) fn copy(
    kept: &mut Option<Source>,
    source: &FillSource,
    introduction: &Introduction,
    (first, count): (u32, u32),
    mut store: impl FnMut(u32, &[PageSum], &[u8]) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    with_source(kept, source, introduction, |from| {
        let mut damaged = Vec::new();
        let mut copied = from.read(source, first, count, &mut |first, sums, data| {
            let pages = data.as_chunks::<PAGE_SIZE>().0;
            let mut begin = 0;
            for (at, (page, sum)) in pages.iter().zip(sums).enumerate() {
                if page_sum(page) != *sum {
                    damaged.push(first + at as u32);
                    let run = &data[begin * PAGE_SIZE..at * PAGE_SIZE];
                    store(first + begin as u32, &sums[begin..at], run)?;
                    begin = at + 1;
                }
            }
            store(first + begin as u32, &sums[begin..], &data[begin * PAGE_SIZE..])
        });
        for page in damaged {
            copied = copied.and_then(|()| from.read(source, page, 1, &mut store));
        }
        copied
    })
}

/// Reads some pages, one by one, and hands each to `store` with its number. They are not verified.
pub(crate) fn read_each(
    kept: &mut Option<Source>,
    source: &FillSource,
    introduction: &Introduction,
    pages: impl Iterator<Item = u32>,
    mut store: impl FnMut(u32, &[u8; PAGE_SIZE]) -> Result<(), Refusal>,
) -> Result<(), Refusal> {
    with_source(kept, source, introduction, |from| {
        for page in pages {
            from.read(source, page, 1, &mut |first, _, data| {
                let pages = data.as_chunks::<PAGE_SIZE>().0;
                (first..).zip(pages).try_for_each(|(page, data)| store(page, data))
            })?;
        }
        Ok(())
    })
}

/// Does something with a connection to the source, and keeps the connection if it may be used
/// again.
fn with_source(
    kept: &mut Option<Source>,
    source: &FillSource,
    introduction: &Introduction,
    work: impl FnOnce(&mut Source) -> Result<(), Interrupted>,
) -> Result<(), Refusal> {
    let fits = |kept: &Source| (kept.address, kept.boot) == (source.address, source.boot);
    let mut from = match kept.take().filter(fits) {
        Some(kept) => kept,
        None => Source::open(source, introduction).map_err(|error| no_source(source, &error))?,
    };
    if from.boot != source.boot {
        return Err(Refusal::NoSource);
    }
    match work(&mut from) {
        Ok(()) => {
            *kept = Some(from);
            Ok(())
        }
        Err(Interrupted::Connection(error)) => Err(no_source(source, &error)),
        Err(Interrupted::Refused(refusal)) => Err(refusal),
    }
}

fn no_source(source: &FillSource, error: &ConnectionError) -> Refusal {
    debug!(address = %source.address, %error, "cannot copy from another donor");
    Refusal::NoSource
}
