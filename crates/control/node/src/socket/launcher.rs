//! A launcher's line to its pager, whichever node supervises that at the moment.
//!
//! The line breaks when the node is killed. The program does not notice, and its launcher looks for
//! the next node as long as the program runs: over the line to that one it learns of the pager's
//! end.

use crate::socket::client::{ClientError, LaunchLine, NodeClient};
use crate::socket::message::{PagerAddress, PagerEnd};
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

/// How often another node is looked for.
const INTERVAL: Duration = Duration::from_millis(250);

/// How long one is looked for once the program has ended: its status is what somebody waits for.
const PATIENCE: Duration = Duration::from_secs(10);

/// A pager that this process has launched.
#[derive(Debug)]
pub struct Launched {
    pager: PagerAddress,
    line: Mutex<Line>,
}

#[derive(Debug)]
struct Line {
    /// To the node that supervises it; `None` while there is none.
    current: Option<LaunchLine>,
    /// Since when no further program will be launched.
    over: Option<Instant>,
}

impl Launched {
    /// The pager that was started over the connection of `client`.
    pub fn new(client: &NodeClient, pager: PagerAddress) -> io::Result<Launched> {
        let line = Line { current: Some(client.launch_line()?), over: None };
        Ok(Launched { pager, line: Mutex::new(line) })
    }

    /// Says that no further program will be launched: the pager ends as soon as nothing uses it.
    pub fn over(&self) {
        let mut line = self.line();
        line.over.get_or_insert_with(Instant::now);
        line.say_over();
    }

    /// Waits for the pager's end, of which `client` or the node after that one's tells.
    pub fn wait_end(&self, mut client: NodeClient) -> Result<PagerEnd, ClientError> {
        loop {
            match client.wait_end() {
                Err(ClientError::Closed | ClientError::Io(_)) => {}
                ended => return ended,
            }
            self.line().current = None;
            client = self.find_node(client.socket())?;
        }
    }

    fn find_node(&self, socket: &Path) -> Result<NodeClient, ClientError> {
        loop {
            match self.resume(socket) {
                Err(ClientError::Closed | ClientError::Io(_)) if !self.is_given_up() => {
                    thread::sleep(INTERVAL);
                }
                Err(ClientError::Io(_)) => return Err(ClientError::Closed),
                found => return found,
            }
        }
    }

    fn resume(&self, socket: &Path) -> Result<NodeClient, ClientError> {
        let mut client = NodeClient::connect(socket)?;
        client.resume(&self.pager)?;
        let mut line = self.line();
        line.current = Some(client.launch_line()?);
        if line.over.is_some() {
            line.say_over();
        }
        drop(line);
        Ok(client)
    }

    /// Without a node, the end of the pager shows in that its socket is gone.
    fn is_given_up(&self) -> bool {
        let over = self.line().over;
        !self.pager.socket.exists() || over.is_some_and(|since| since.elapsed() > PATIENCE)
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().expect("no thread panics with the line")
    }
}

impl Line {
    fn say_over(&self) {
        if let Some(line) = &self.current
            && let Err(error) = line.over()
        {
            // Said once more to the next node.
            tracing::debug!(%error, "the node is gone");
        }
    }
}
