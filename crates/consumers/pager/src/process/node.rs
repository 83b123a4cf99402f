//! The line to the node: who the donors are, and what the pager has to tell.
//!
//! One line of JSON each way, as `hecaton-node` documents. The node may be away for a while (it is
//! being upgraded): the pager goes on with what it knows.

use crate::config::{Donor, PagerConfig};
use crate::stats::Stats;
use hecaton_policy::site::Site;
use hecaton_space::{Directory, DonorAddress};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long the node may take to answer.
const DEADLINE: Duration = Duration::from_secs(2);
/// Most bytes of an answer.
const MAX_ANSWER: u64 = 4 << 20;

/// A connection to the node, made when it is needed.
pub(crate) struct NodeLine {
    consumer: String,
    socket: Option<PathBuf>,
    stream: Option<BufReader<UnixStream>>,
}

impl NodeLine {
    pub(crate) fn new(config: &PagerConfig) -> NodeLine {
        let consumer = config.consumer.clone();
        NodeLine { consumer, socket: config.node.clone(), stream: None }
    }

    /// Tells the node the statistics; whether it listens is its own affair. Returns its word on how
    /// many bytes of the pool the consumer may hold, if it has one: `Some(None)` is that nothing
    /// limits it.
    pub(crate) fn report(&mut self, stats: &Stats) -> Option<Option<u64>> {
        let Ok(Value::Object(mut stats)) = serde_json::to_value(stats) else { return None };
        stats.insert("consumer".into(), self.consumer.clone().into());
        match self.ask(&json!({ "pager_stats": stats })) {
            Ok(answer) => target_in(&answer),
            Err(error) => {
                tracing::debug!(%error, "the node did not take the statistics");
                None
            }
        }
    }

    fn ask(&mut self, request: &Value) -> std::io::Result<Value> {
        let Some(path) = &self.socket else { return Ok(Value::Null) };
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => connect(path)?,
        };
        let answer = exchange(&mut stream, request)?;
        self.stream = Some(stream);
        Ok(answer)
    }
}

fn target_in(answer: &Value) -> Option<Option<u64>> {
    let bytes = answer.get("target")?.get("bytes")?;
    match bytes.is_null() {
        true => Some(None),
        false => bytes.as_u64().map(Some),
    }
}

fn connect(path: &Path) -> std::io::Result<BufReader<UnixStream>> {
    let stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_write_timeout(Some(DEADLINE))?;
    Ok(BufReader::new(stream))
}

fn exchange(stream: &mut BufReader<UnixStream>, request: &Value) -> std::io::Result<Value> {
    let mut line = request.to_string();
    line.push('\n');
    stream.get_mut().write_all(line.as_bytes())?;
    let mut answer = String::new();
    stream.by_ref().take(MAX_ANSWER).read_line(&mut answer)?;
    Ok(serde_json::from_str(&answer)?)
}

/// Lists the donors: those that the node names, and all that it named before. A donor that the node
/// no longer names may still hold pages, because its node is silent to the manager, or the manager
/// is away. So the configuration keeps all donors for this process's successor.
pub(crate) struct NodeDirectory {
    config: Arc<Mutex<PagerConfig>>,
    line: Mutex<NodeLine>,
}

impl NodeDirectory {
    pub(crate) fn new(config: Arc<Mutex<PagerConfig>>) -> NodeDirectory {
        let line = NodeLine::new(&config.lock().expect("never poisoned"));
        NodeDirectory { config, line: Mutex::new(line) }
    }
}

impl Directory for NodeDirectory {
    fn donors(&self) -> Vec<DonorAddress> {
        let answer = self.line.lock().expect("never poisoned").ask(&json!("donors"));
        let known = &mut self.config.lock().expect("never poisoned").donors;
        if let Ok(answer) = answer
            && let Ok(donors) = serde_json::from_value::<Vec<Donor>>(answer["donors"].clone())
        {
            *known = Donor::joined(donors, std::mem::take(known));
        }
        let address = |donor: &Donor| DonorAddress {
            name: donor.name.clone(),
            site: Site { host: donor.node.clone(), location: donor.location.clone() },
            addr: donor.address,
        };
        known.iter().map(address).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_a_number_of_bytes_or_none_or_not_spoken_of() {
        assert_eq!(target_in(&json!({ "target": { "bytes": 8192 } })), Some(Some(8192)));
        assert_eq!(target_in(&json!({ "target": { "bytes": null } })), Some(None));
        for silence in [json!("done"), json!(null), json!({ "refused": "no" })] {
            assert_eq!(target_in(&silence), None, "{silence}");
        }
    }
}
