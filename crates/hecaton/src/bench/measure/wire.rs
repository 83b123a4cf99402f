//! The plain TCP that paging is compared with: no protocol of ours, no threads beside the two ends.
//!
//! A request is 16 bytes: how many bytes the answer has, and from which processor it is to come.
//! With 4096 bytes that is the ping-pong of `bench fault`, with a gigabyte the stream of `bench
//! stream`.
//!
//! The processors of the two ends decide about a round trip. Two threads that take turns on one
//! processor wake each other in a microsecond or two. Waking a thread on another, sleeping
//! processor costs several times as much, most of all in a virtual machine. The scheduler chooses
//! one or the other, and keeps its choice for seconds. So the ping-pong is measured in all three
//! ways.

use anyhow::Context as _;
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use std::{
    io::{ErrorKind, Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

const REQUEST_BYTES: usize = 16;

/// Where the two ends of a round trip run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ends {
    /// Where the scheduler puts them.
    Free,
    /// Both on the processor that the asking thread is on.
    Together,
    /// The answering end on another processor than the asking one.
    Apart,
}

/// Bytes of one read or write call on either side of a stream.
const CHUNK_BYTES: usize = 256 << 10;

/// Answers on a loopback port until the process ends: one thread for each connection, blocking.
pub(crate) fn serve() -> anyhow::Result<SocketAddr> {
    serve_at(Ipv4Addr::LOCALHOST)
}

/// Answers on a port of that address.
pub(crate) fn serve_at(address: Ipv4Addr) -> anyhow::Result<SocketAddr> {
    let listener =
        TcpListener::bind((address, 0)).with_context(|| format!("cannot listen on {address}"))?;
    let address = listener.local_addr()?;
    thread::Builder::new().name("wire".into()).spawn(move || {
        for stream in listener.incoming().flatten() {
            // A client that goes away ends its own connection and nothing else.
            let _ = thread::Builder::new().name("wire".into()).spawn(move || answer(stream));
        }
    })?;
    Ok(address)
}

fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut request = [0; REQUEST_BYTES];
    let chunk = vec![0x5a; CHUNK_BYTES];
    let anywhere = sched_getaffinity(None)?;
    let mut placed = 0;
    loop {
        match stream.read_exact(&mut request) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => return Ok(()),
            other => other?,
        }
        let (length, place) = request.split_at(8);
        let place = u64::from_le_bytes(place.try_into().expect("eight bytes"));
        if place != placed {
            let only = place.checked_sub(1).map(|cpu| only(cpu as usize));
            sched_setaffinity(None, &only.unwrap_or(anywhere))?;
            placed = place;
        }
        let mut left = u64::from_le_bytes(length.try_into().expect("eight bytes"));
        while left > 0 {
            let now = left.min(CHUNK_BYTES as u64);
            stream.write_all(&chunk[..now as usize])?;
            left -= now;
        }
    }
}

/// The asking end.
pub(crate) struct Wire {
    stream: TcpStream,
    buffer: Vec<u8>,
}

/// An answer up to this size is read onto the stack, which `hecaton run` does not page. A buffer on
/// the heap could be evicted between two round trips, and the wire would look slower than it is.
const SMALL_BYTES: usize = 4096;

impl Wire {
    pub(crate) fn connect(address: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address)
            .with_context(|| format!("cannot reach the plain TCP server at {address}"))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: vec![0; CHUNK_BYTES] })
    }

    /// Asks for one page `count` times, with the ends where they are to be; hands each round trip's
    /// time to `record`. Says whether there are processors enough for that.
    pub(crate) fn ping(
        &mut self,
        ends: Ends,
        count: u64,
        mut record: impl FnMut(Duration),
    ) -> anyhow::Result<bool> {
        let before = sched_getaffinity(None)?;
        let here = sched_getcpu();
        let answerer = match ends {
            Ends::Free => None,
            Ends::Together => Some(here),
            Ends::Apart => {
                let other = (0..CpuSet::MAX_CPU).find(|&cpu| cpu != here && before.is_set(cpu));
                let Some(other) = other else { return Ok(false) };
                Some(other)
            }
        };
        if answerer.is_some() {
            sched_setaffinity(None, &only(here))?;
        }
        // The first only brings the answering end to its place.
        let mut outcome = self.exchange(SMALL_BYTES as u64, answerer);
        for _ in 0..count {
            let Ok(_) = outcome else { break };
            outcome = self.exchange(SMALL_BYTES as u64, answerer).inspect(|took| record(*took));
        }
        sched_setaffinity(None, &before)?;
        outcome.map(|_| true)
    }

    /// Asks for `bytes` and reads them all.
    pub(crate) fn ask(&mut self, bytes: u64) -> anyhow::Result<Duration> {
        self.exchange(bytes, None)
    }

    fn exchange(&mut self, bytes: u64, answerer: Option<usize>) -> anyhow::Result<Duration> {
        let mut request = [0; REQUEST_BYTES];
        request[..8].copy_from_slice(&bytes.to_le_bytes());
        let place = answerer.map_or(0, |cpu| cpu as u64 + 1);
        request[8..].copy_from_slice(&place.to_le_bytes());
        let mut small = [0; SMALL_BYTES];
        let buffer =
            if bytes <= SMALL_BYTES as u64 { &mut small[..] } else { &mut self.buffer[..] };
        let start = Instant::now();
        self.stream.write_all(&request)?;
        let mut left = bytes;
        while left > 0 {
            let most = left.min(buffer.len() as u64) as usize;
            let read = self.stream.read(&mut buffer[..most])?;
            anyhow::ensure!(read > 0, "the plain TCP server has gone away");
            left -= read as u64;
        }
        Ok(start.elapsed())
    }
}

fn only(cpu: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(cpu);
    set
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_answer_has_the_length_asked_for() {
        let mut wire = Wire::connect(serve().unwrap()).unwrap();
        for bytes in [4096, 1, CHUNK_BYTES as u64 * 3 + 7, 4096] {
            wire.ask(bytes).unwrap();
        }
        wire.stream.set_nonblocking(true).unwrap();
        let surplus = wire.stream.read(&mut [0]).unwrap_err();
        assert_eq!(surplus.kind(), ErrorKind::WouldBlock);
    }

    #[test]
    fn pings_are_counted_wherever_the_ends_are() {
        let mut wire = Wire::connect(serve().unwrap()).unwrap();
        let before = sched_getaffinity(None).unwrap();
        for ends in [Ends::Free, Ends::Together, Ends::Apart, Ends::Free] {
            let mut count = 0;
            let measured = wire.ping(ends, 5, |_| count += 1).unwrap();
            assert!(measured || (ends == Ends::Apart && before.count() == 1));
            assert_eq!(count, if measured { 5 } else { 0 });
            assert_eq!(sched_getaffinity(None).unwrap(), before);
        }
    }
}
