//! How commands find their cluster: `--manager`, else `HECATON_MANAGER`, else the directory where
//! `hecaton dev` or `hecaton node` wrote where the manager is.

use crate::failure::usage;
use anyhow::{Context as _, anyhow, bail};
use hecaton_manager::ClusterStatus;
use hecaton_memory::Size;
use hecaton_node::NodePaths;
use hecaton_node::client::NodeClient;
use hecaton_node::report::Host;
use std::env;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;
use ureq::Body;
use ureq::http::Response;

/// The variable that names the manager.
const MANAGER_VARIABLE: &str = "HECATON_MANAGER";

/// How long a manager may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Longest refusal that is read.
const MAX_REFUSAL_BYTES: u64 = 4 << 10;

/// Longest status that is read.
const MAX_STATUS_BYTES: u64 = 256 << 20;

/// Which cluster is meant.
#[derive(clap::Args)]
pub(crate) struct ClusterArgs {
    /// The manager of the cluster, such as http://127.0.0.1:7070
    #[arg(long, value_name = "URL")]
    manager: Option<String>,
    /// The directory of the node on this host
    #[arg(long, value_name = "DIR", conflicts_with = "manager")]
    dir: Option<PathBuf>,
}

/// A manager's base URL, and where it was found.
#[derive(Debug)]
pub(crate) struct Manager {
    /// The base URL.
    pub(crate) url: String,
    origin: String,
}

impl ClusterArgs {
    /// The manager, if anything names one.
    pub(crate) fn manager(&self) -> anyhow::Result<Option<Manager>> {
        if let Some(url) = &self.manager {
            return Manager::new(url, "--manager".to_owned()).map(Some);
        }
        // A directory that was named counts more than the environment.
        let variable = env::var(MANAGER_VARIABLE).ok().filter(|url| !url.is_empty());
        if let (Some(url), None) = (variable, &self.dir) {
            return Manager::new(&url, MANAGER_VARIABLE.to_owned()).map(Some);
        }
        let paths = self.paths();
        let file = paths.manager_file();
        let read = paths.read_manager_file();
        let read = read.with_context(|| format!("cannot read {}", file.display()))?;
        read.map(|found| Manager::new(&found.url, file.display().to_string())).transpose()
    }

    /// The manager; fails if nothing names one.
    pub(crate) fn need_manager(&self) -> anyhow::Result<Manager> {
        self.manager()?.with_context(|| self.none_found())
    }

    /// The node on this host through which the cluster is reached; `None` if there is no cluster.
    pub(crate) fn local_node(&self) -> anyhow::Result<Option<NodeClient>> {
        let named = self.manager.is_some()
            || (self.dir.is_none() && env::var_os(MANAGER_VARIABLE).is_some_and(|v| !v.is_empty()));
        if named {
            return self.need_manager()?.local_node().map(Some);
        }
        let socket = self.paths().control_socket();
        match NodeClient::connect(&socket) {
            Ok(client) => Ok(Some(client)),
            // No node was here, or one was killed.
            Err(error)
                if self.dir.is_none()
                    && matches!(
                        error.kind(),
                        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
                    ) =>
            {
                Ok(None)
            }
            Err(error) => Err(error).with_context(|| {
                format!("no node answers at {}; is it running?", socket.display())
            }),
        }
    }

    /// The node on this host; fails if there is no cluster.
    pub(crate) fn need_local_node(&self) -> anyhow::Result<NodeClient> {
        self.local_node()?.with_context(|| self.none_found())
    }

    fn none_found(&self) -> String {
        format!(
            "there is no cluster in {}; start one with `hecaton dev`, or name one with --manager URL",
            self.dir().display()
        )
    }

    /// The directory that is looked at when no manager is named.
    pub(crate) fn dir(&self) -> PathBuf {
        self.dir.clone().unwrap_or_else(NodePaths::default_dir)
    }

    fn paths(&self) -> NodePaths {
        NodePaths::new(self.dir())
    }
}

impl Manager {
    fn new(url: &str, origin: String) -> anyhow::Result<Manager> {
        check_url(url, &origin)?;
        Ok(Manager { url: url.trim_end_matches('/').to_owned(), origin })
    }

    /// Asks for the state of the cluster.
    pub(crate) fn status(&self) -> anyhow::Result<ClusterStatus> {
        let agent =
            ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).build().new_agent();
        let asked = agent.get(format!("{}/v1/status", self.url)).call();
        let answered = asked.and_then(|mut response| {
            response.body_mut().with_config().limit(MAX_STATUS_BYTES).read_json()
        });
        answered.map_err(|error| self.unreachable(&error))
    }

    /// Has a donor drain, or lend again.
    pub(crate) fn drain(&self, donor: &str, draining: bool) -> anyhow::Result<()> {
        let url = format!("{}/v1/donors/{donor}/drain", self.url);
        self.order(|agent| match draining {
            true => agent.post(&url).send_empty(),
            false => agent.delete(&url).call(),
        })
    }

    /// Has a donor lend no more than so many bytes, or again all that it has.
    pub(crate) fn limit(&self, donor: &str, limit: Option<Size>) -> anyhow::Result<()> {
        let url = format!("{}/v1/donors/{donor}/limit", self.url);
        self.order(|agent| match limit {
            Some(Size(bytes)) => agent.put(format!("{url}?bytes={bytes}")).send_empty(),
            None => agent.delete(&url).call(),
        })
    }

    fn order(
        &self,
        send: impl FnOnce(&ureq::Agent) -> Result<Response<Body>, ureq::Error>,
    ) -> anyhow::Result<()> {
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            .build()
            .new_agent();
        let mut response = send(&agent).map_err(|error| self.unreachable(&error))?;
        if !response.status().is_success() {
            let text = response.body_mut().with_config().limit(MAX_REFUSAL_BYTES).read_to_string();
            bail!("{}", text.unwrap_or_else(|_| response.status().to_string()));
        }
        Ok(())
    }

    fn unreachable(&self, error: &ureq::Error) -> anyhow::Error {
        anyhow!(
            "no manager answers at {} (from {}): {error}; start one with `hecaton dev` or \
             `hecaton manager`, or name another one with --manager",
            self.url,
            self.origin
        )
    }

    /// A node of the cluster that runs on this host.
    fn local_node(&self) -> anyhow::Result<NodeClient> {
        let status = self.status()?;
        let here = Host::here().context("cannot read /proc")?;
        let local = status.nodes.iter().filter(|node| node.report.host.boot_id == here.boot_id);
        for node in local {
            match NodeClient::connect(&node.report.control_socket) {
                Ok(client) => return Ok(client),
                Err(error) => {
                    let socket = node.report.control_socket.display();
                    tracing::debug!(node = node.report.name, %socket, %error, "not usable");
                }
            }
        }
        bail!(
            "the cluster of {} has no node on this host that user {} may use; start one with \
             `hecaton node --manager {}`",
            self.url,
            rustix::process::geteuid().as_raw(),
            self.url
        )
    }
}

/// Refuses what cannot be a manager's URL.
pub(crate) fn check_url(url: &str, origin: &str) -> anyhow::Result<()> {
    let host = url.strip_prefix("http://").map(|rest| rest.trim_end_matches('/'));
    if host.is_none_or(|host| host.is_empty() || host.contains(['/', '?', '#', ' ', '@'])) {
        usage!("`{url}` (from {origin}) is no manager: write http://HOST:PORT");
    }
    Ok(())
}

/// The manager that a node is told of: `--manager`, else `HECATON_MANAGER`.
pub(crate) fn manager_for_node(option: Option<String>) -> anyhow::Result<String> {
    let Some(url) = option.or_else(|| env::var(MANAGER_VARIABLE).ok()) else {
        usage!("the node needs a manager: give --manager URL or set {MANAGER_VARIABLE}");
    };
    check_url(&url, "--manager")?;
    Ok(url)
}

/// The directory that is meant.
pub(crate) fn dir_or_default(dir: Option<&Path>) -> PathBuf {
    dir.map_or_else(NodePaths::default_dir, Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_are_checked() {
        for good in ["http://127.0.0.1:7070", "http://manager:80/", "http://[::1]:1"] {
            assert!(check_url(good, "a test").is_ok(), "{good}");
        }
        for bad in ["", "127.0.0.1:7070", "https://x", "http://", "http://a/b", "ftp://a"] {
            assert!(check_url(bad, "a test").is_err(), "{bad}");
        }
    }
}
