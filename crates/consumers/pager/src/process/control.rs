//! The pager's own socket, for people, tests and benchmarks: one request, one answer, one line
//! each.
//!
//! | request | answer |
//! |---|---|
//! | `"stats"` | [`crate::Stats`] |
//! | `{"resize_local":{"bytes":N}}` | [`crate::Stats`], once at most N bytes are local |
//! | `{"place":{...}}` | [`crate::Stats`]; takes a [`crate::Placement`] with unchanged `copies` |
//! | `"detach"` | [`crate::Stats`], once the machine's pages begin to come home |
//! | `{"evict":{"down_to_bytes":N}}` | [`crate::Stats`], once at most N bytes are local |
//!
//! After `place`, memory with other donors is moved. A detach is done when the statistics say that
//! no process is attached. `evict` and `resize_local` answer once all evicted pages are written
//! out.

use crate::config::MIN_LOCAL_BYTES;
use crate::pool::placement::Placement;
use crate::process::housekeeping::Pool;
use crate::process::sigterm::TERMINATED;
use crate::shared::Shared;
use hecaton_memory::pages_for_bytes;
use rustix::event::{PollFd, PollFlags, poll};
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

#[derive(Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Request {
    Stats,
    ResizeLocal { bytes: u64 },
    Evict { down_to_bytes: u64 },
    Detach,
    Place(Placement),
}

/// How long a client may take to say what it wants, and an eviction to be done.
const PATIENCE: Duration = Duration::from_secs(5);
const EVICTION_PATIENCE: Duration = Duration::from_secs(30);
const MAX_REQUEST: usize = 64 << 10;

/// Pause if the system gives no connection.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves one client after another for as long as the process lives. The listener does not block.
pub(crate) fn serve(listener: &UnixListener, shared: &Shared, pool: &Pool) -> ! {
    loop {
        // A thread that is killed as it waits here leaves the connection to the next pager. One
        // that waits in `accept` may still take the connection, and then hang up.
        let mut polled = [PollFd::new(listener, PollFlags::IN)];
        let _ = poll(&mut polled, None);
        match listener.accept() {
            Ok((stream, _)) => {
                if let Err(error) = answer(stream, shared, pool) {
                    tracing::debug!(%error, "a client of the control socket went away");
                }
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => {
                tracing::warn!(%error, "the control socket gives no connection");
                std::thread::sleep(PAUSE);
            }
        }
    }
}

/// Reads a line, however slowly it comes.
fn read_request(mut stream: &UnixStream) -> std::io::Result<Vec<u8>> {
    let until = Instant::now() + PATIENCE;
    let mut line = Vec::new();
    let mut part = [0; 4096];
    while line.len() < MAX_REQUEST && !line.contains(&b'\n') {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut part) {
            Ok(0) => break,
            Ok(read) => line.extend_from_slice(&part[..read]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    line.truncate(line.iter().position(|&byte| byte == b'\n').unwrap_or(line.len()));
    Ok(line)
}

fn answer(stream: UnixStream, shared: &Shared, pool: &Pool) -> std::io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let line = read_request(&stream)?;
    let answer = match serde_json::from_slice::<Request>(&line) {
        Ok(request) => perform(&request, shared, pool),
        Err(error) => json!({ "refused": error.to_string() }),
    };
    writeln!(&stream, "{answer}")
}

fn perform(request: &Request, shared: &Shared, pool: &Pool) -> Value {
    let done = match *request {
        Request::Place(ref placement) => place(placement, pool),
        Request::Stats => Ok(()),
        Request::ResizeLocal { bytes } if bytes < MIN_LOCAL_BYTES => {
            Err(format!("{bytes} bytes are too few: a pager works with {MIN_LOCAL_BYTES} or more"))
        }
        Request::ResizeLocal { .. } | Request::Evict { .. } if shared.lock().limit_is_advisory => {
            Err("nothing can be taken away from this machine's memory, which is private".into())
        }
        Request::ResizeLocal { bytes } => {
            let pages = pages_for_bytes(bytes);
            let mut core = shared.lock();
            let before = core.limit;
            core.resize(pages);
            drop(core);
            evict_down_to(shared, pages)
                .inspect(|()| pool.config().local_bytes = bytes)
                .inspect_err(|_| shared.lock().resize(before))
        }
        Request::Detach => match available_bytes() {
            Ok(bytes) => {
                let begun = shared.lock().begin_detach(bytes);
                shared.detaching.fetch_or(begun.is_ok(), Ordering::Relaxed);
                begun
            }
            Err(error) => Err(format!("cannot read /proc/meminfo: {error}")),
        },
        Request::Evict { down_to_bytes } => evict_down_to(shared, pages_for_bytes(down_to_bytes)),
    };
    match done {
        Ok(()) => json!(pool.stats(shared)),
        Err(why) => json!({ "refused": why }),
    }
}

fn place(placement: &Placement, pool: &Pool) -> Result<(), String> {
    placement.check().map_err(|error| error.to_string())?;
    let mut config = pool.config();
    let copies = config.placement.copies;
    if placement.copies != copies {
        return Err(format!("{copies} copies of each page are kept, which does not change"));
    }
    placement.apply(&pool.space, &config.placement);
    config.placement = placement.clone();
    Ok(())
}

/// Bytes of this host that could be used.
fn available_bytes() -> std::io::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| std::io::ErrorKind::InvalidData.into())
}

fn evict_down_to(shared: &Shared, pages: u64) -> Result<(), String> {
    shared.lock().evict_to = Some(pages);
    shared.evict.notify_one();
    let until = Instant::now() + EVICTION_PATIENCE;
    let is_done = || {
        let core = shared.lock();
        core.resident <= pages && core.batch.is_empty() && core.staging.unwritten() == 0
    };
    let mut done = is_done();
    // Programs that are being ended need not be waited for.
    while !done && Instant::now() < until && !TERMINATED.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(2));
        done = is_done();
    }
    shared.lock().evict_to = None;
    let why = || format!("not done within {} seconds", EVICTION_PATIENCE.as_secs());
    done.then_some(()).ok_or_else(why)
}
