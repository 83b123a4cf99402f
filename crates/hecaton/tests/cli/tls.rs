//! Mutual TLS of the control plane, with the real commands: who is let in, and what both sides say
//! when somebody is not.

use crate::common::{Daemon, borrow, hecaton, scratch, signal_process, text, wait, wait_until_so};
use hecaton_testkit::wait_until_seen;
use rustix::process::Signal;
use serde_json::Value;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// A manager with certificates, whose log can be looked at.
struct Cluster {
    scratch: tempfile::TempDir,
    manager: Daemon,
}

/// Issues a certificate of the authority `pki`, made if it is not there.
fn issue(pki: &Path, name: &str, role: &str, options: &[&str]) -> PathBuf {
    if !pki.exists() {
        let made = hecaton().args(["pki", "init", "--dir"]).arg(pki).output().expect("runs");
        assert!(made.status.success(), "{}", text(&made.stderr));
    }
    let mut command = hecaton();
    command.args(["pki", "issue", name, "--json"]).args(options);
    // A node's is what is issued without a role.
    if role != "node" {
        command.args(["--role", role]);
    }
    let issued = command.arg("--dir").arg(pki).output().expect("runs");
    assert!(issued.status.success(), "{}", text(&issued.stderr));
    let issued: Value = serde_json::from_slice(&issued.stdout).expect("JSON");
    issued["dir"].as_str().expect("a directory").into()
}

impl Cluster {
    fn start() -> Cluster {
        let scratch = scratch();
        let own = issue(&scratch.path().join("pki"), "m", "manager", &["--host", "127.0.0.1"]);
        let log = File::create(scratch.path().join("manager.log")).expect("a file");
        let mut command = hecaton();
        command.args(["manager", "--json", "--listen", "127.0.0.1:0", "--tls-dir"]).arg(own);
        let manager = Daemon::start(command.env("HECATON_LOG", "info").stderr(log));
        Cluster { scratch, manager }
    }

    fn issue(&self, name: &str, role: &str, options: &[&str]) -> PathBuf {
        issue(&self.scratch.path().join("pki"), name, role, options)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.scratch.path().join("manager.log")).expect("read")
    }

    fn ask(&self, dir: &Path, args: &[&str]) -> Output {
        let mut command = hecaton();
        command.args(args).args(["--manager", self.manager.manager(), "--tls-dir"]).arg(dir);
        command.output().expect("runs")
    }

    /// The state of the node `a`.
    fn state(&self, dir: &Path) -> Value {
        let output = self.ask(dir, &["status", "--json"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let status: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        status["nodes"][0]["state"].clone()
    }

    fn wait_until_node_is(&self, state: &str, reader: &Path) {
        let what = format!("node `a` is {state}");
        wait_until_so(&what, || self.state(reader), |shown| shown == state);
    }

    /// Asks, is refused, and finds the reasons on both sides.
    fn refused(&self, dir: &Path, args: &[&str], heard: &str, logged: &str) {
        // The log has a line a second at most about refused connections: it may take a few.
        wait_until_seen(&format!("the log says `{logged}`"), || {
            let output = self.ask(dir, args);
            let error = text(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{error}");
            assert!(error.lines().count() == 1 && error.contains(heard), "{error}");
            let log = self.log();
            if log.contains(logged) { Ok(()) } else { Err(log) }
        });
    }

    fn node(&self, dir: &Path) -> Node {
        let mut command = hecaton();
        command.args(["node", "--name", "a", "--lend", "64M", "--manager", self.manager.manager()]);
        command.arg("--tls-dir").arg(dir).arg("--dir").arg(self.scratch.path().join("a"));
        Node(command.stderr(Stdio::null()).spawn().expect("starts"))
    }
}

/// A node, ended with the test.
struct Node(Child);

impl Drop for Node {
    fn drop(&mut self) {
        signal_process(self.0.id(), Signal::TERM);
        wait(&mut self.0);
    }
}

#[test]
fn who_is_known_is_let_in_and_nobody_else() {
    let cluster = Cluster::start();
    assert!(cluster.manager.manager().starts_with("https://"));
    let reader = cluster.issue("r", "read-only", &[]);
    let admin = cluster.issue("root", "admin", &[]);
    let of_node = cluster.issue("a", "node", &[]);
    let node = cluster.node(&of_node);
    cluster.wait_until_node_is("up", &reader);

    // Roles.
    let drain: &[&str] = &["node", "drain", "a", "--cancel"];
    let reason = "read-only `r` may not give orders";
    cluster.refused(&reader, drain, reason, reason);
    let reason = "node `a` may not see the cluster";
    cluster.refused(&of_node, &["status"], reason, reason);
    let taken = cluster.ask(&admin, drain);
    assert!(taken.status.success(), "{}", text(&taken.stderr));

    // The node's donor has nothing to say to who shows no certificate.
    let status = cluster.ask(&reader, &["status", "--json"]);
    let status: Value = serde_json::from_slice(&status.stdout).expect("JSON");
    let plain = borrow(&status["nodes"][0]["donors"][0], 1);
    assert!(plain.is_err(), "it has lent without TLS");

    // Another authority's certificate, with and without trust in this manager.
    let stranger = issue(&cluster.scratch.path().join("other"), "x", "admin", &[]);
    let heard = "no authority in";
    cluster.refused(&stranger, &["status"], heard, "refused a connection");
    fs::copy(reader.join("ca.pem"), stranger.join("ca.pem")).expect("copied");
    cluster.refused(&stranger, &["status"], "crl.pem is of its authority", "refused a connection");
    fs::copy(reader.join("crl.pem"), stranger.join("crl.pem")).expect("copied");
    cluster.refused(&stranger, &["status"], "it is of another authority", "UnknownIssuer");
    // Nobody without TLS.
    let plain = cluster.manager.manager().replace("https", "http");
    wait_until_seen("the refusal is logged", || {
        let output = hecaton().args(["status", "--manager", &plain]).output().expect("runs");
        let error = text(&output.stderr);
        assert!(error.contains("this manager speaks TLS only; use https://"), "{error}");
        let log = cluster.log();
        if log.contains("it does not speak TLS") { Ok(()) } else { Err(log) }
    });

    // Revoked while it runs; and taken in again with a new certificate, without a restart.
    let pki = cluster.scratch.path().join("pki");
    let revoke = hecaton().args(["pki", "revoke", "a", "--dir"]).arg(&pki).output().expect("runs");
    assert!(revoke.status.success(), "{}", text(&revoke.stderr));
    cluster.wait_until_node_is("silent", &reader);
    assert!(cluster.log().contains("Revoked"), "{}", cluster.log());
    assert_eq!(cluster.issue("a", "node", &[]), of_node);
    cluster.wait_until_node_is("up", &reader);
    // The manager's own is renewed under it.
    cluster.issue("m", "manager", &["--host", "127.0.0.1", "--renew"]);
    assert_eq!(cluster.state(&reader), "up");

    drop(node);
    // Not a line of any key is in the log.
    let log = cluster.log();
    for dir in [&reader, &admin, &of_node, &pki.join("issued/m"), &stranger] {
        let key = fs::read_to_string(dir.join("key.pem")).expect("read");
        let secret = key.lines().filter(|line| !line.starts_with("---"));
        assert!(secret.clone().count() > 0 && !secret.clone().any(|line| log.contains(line)));
    }
    assert!(!log.contains("PRIVATE"), "{log}");
}

#[test]
fn certificates_are_for_who_they_name() {
    let scratch = scratch();
    let pki = scratch.path().join("pki");
    let (node, admin) = (issue(&pki, "a", "node", &[]), issue(&pki, "root", "admin", &[]));
    let start = |args: &[&str], dir: &Path| {
        let output = hecaton().args(args).arg("--tls-dir").arg(dir).output().expect("runs");
        (output.status.code(), text(&output.stderr))
    };
    let as_node = |name| ["node", "--manager", "https://127.0.0.1:1", "--name", name];
    for (args, dir, words) in [
        (&as_node("b")[..], &node, ["--name b", "node `a`"]),
        (&as_node("root")[..], &admin, ["admin `root`", "--role node"]),
        (&["manager"][..], &admin, ["admin `root`", "--role manager"]),
    ] {
        let (code, error) = start(args, dir);
        assert_eq!((code, error.lines().count()), (Some(2), 1), "{error}");
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    let (code, error) = start(&["manager"], scratch.path());
    assert_eq!((code, error.lines().count()), (Some(1), 1), "{error}");
    assert!(error.contains("key.pem") && error.contains("hecaton pki issue"), "{error}");
    let again = hecaton().args(["pki", "init", "--dir"]).arg(&pki).output().expect("runs");
    assert_eq!(again.status.code(), Some(1));
    assert!(text(&again.stderr).contains("there is an authority"));
    let unknown = hecaton().args(["pki", "revoke", "x", "--dir"]).arg(&pki).output().expect("runs");
    assert!(text(&unknown.stderr).contains("`x` has no certificate"));
}

/// The browser's certificate file is made as docs/security.md says; curl reads it as browsers do.
#[test]
fn a_browser_gets_in_with_a_certificate_in_one_file() {
    for tool in ["openssl", "curl"] {
        if Command::new(tool).arg("--version").output().is_err() {
            eprintln!("SKIPPED: `{tool}` is not installed");
            return;
        }
    }
    let cluster = Cluster::start();
    let dir = cluster.issue("alice", "read-only", &[]);
    let mut export = Command::new("openssl");
    export.args([
        "pkcs12",
        "-export",
        "-in",
        "cert.pem",
        "-inkey",
        "key.pem",
        "-certfile",
        "ca.pem",
    ]);
    export.args(["-name", "Hecaton alice", "-out", "alice.p12", "-passout", "pass:secret"]);
    let made = export.current_dir(&dir).output().expect("runs");
    assert!(made.status.success(), "{}", text(&made.stderr));
    let ask = |path: &str, options: &[&str]| {
        let mut curl = Command::new("curl");
        curl.args([
            "--silent",
            "--cacert",
            "ca.pem",
            "--output",
            "answer",
            "--write-out",
            "%{http_code}",
        ]);
        let url = format!("{}{path}", cluster.manager.manager());
        text(&curl.args(options).arg(url).current_dir(&dir).output().expect("runs").stdout)
    };
    let own = ["--cert-type", "P12", "--cert", "alice.p12:secret"];
    assert_eq!(ask("/", &own), "200");
    let page = fs::read_to_string(dir.join("answer")).expect("read");
    assert!(page.contains("<title>"), "{page}");
    assert_eq!(ask("/v1/overview", &own), "200");
    assert_eq!(ask("/", &[]), "000", "without it");
}

/// A file that only its owner may read.
fn write_secret(path: &Path, text: &str) {
    use std::os::unix::fs::OpenOptionsExt as _;
    let mut options = fs::OpenOptions::new();
    let mut file = options.write(true).create_new(true).mode(0o600).open(path).expect("made");
    file.write_all(text.as_bytes()).expect("written");
}

#[test]
fn a_node_joins_with_a_token() {
    let cluster = Cluster::start();
    let pki = cluster.scratch.path().join("pki");
    let log = File::create(cluster.scratch.path().join("authority.log")).expect("a file");
    let mut serve = hecaton();
    serve.args(["pki", "serve", "--json", "--listen", "127.0.0.1:0", "--dir"]).arg(&pki);
    let authority = Daemon::start(serve.env("HECATON_LOG", "info").stderr(log));
    let at = authority.ready["authority"].as_str().expect("an address");
    let token = |options: &[&str]| {
        let mut command = hecaton();
        command.args(["pki", "token", "--at", at, "--dir"]).arg(&pki).args(options);
        let output = command.output().expect("runs");
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let file = cluster.scratch.path().join("token");
    write_secret(&file, &token(&[]));

    let of_node = cluster.scratch.path().join("a-tls");
    let start = |name: &str, dir: &Path| {
        let mut command = hecaton();
        command.args(["node", "--name", name, "--lend", "64M", "--join"]).arg(&file);
        command.args(["--manager", cluster.manager.manager(), "--tls-dir"]).arg(dir);
        command.arg("--dir").arg(cluster.scratch.path().join(name));
        command
    };
    let reader = cluster.issue("r", "read-only", &[]);
    let node = Node(start("a", &of_node).stderr(Stdio::null()).spawn().expect("starts"));
    cluster.wait_until_node_is("up", &reader);
    drop(node);
    // With the same command line, and no token that is good: it has its certificate.
    let node = Node(start("a", &of_node).stderr(Stdio::null()).spawn().expect("starts"));
    cluster.wait_until_node_is("up", &reader);
    drop(node);

    let refused = start("b", &cluster.scratch.path().join("b-tls")).output().expect("runs");
    let error = text(&refused.stderr);
    assert_eq!((refused.status.code(), error.lines().count()), (Some(1), 1), "{error}");
    assert!(error.contains("refuses: the token is not known"), "{error}");
    token(&["--uses", "3"]);
    let mut withdraw = hecaton();
    withdraw.args(["pki", "token", "--withdraw-all", "--dir"]).arg(&pki);
    let withdrawn = withdraw.output().expect("runs");
    assert!(text(&withdrawn.stdout).starts_with("Withdrew 1 token"), "{withdrawn:?}");
    // Neither the token nor the key is in a log.
    let log = fs::read_to_string(cluster.scratch.path().join("authority.log")).expect("read");
    assert!(log.contains("took a node in") && log.contains("refused a node"), "{log}");
    let written = fs::read_to_string(&file).expect("read");
    let secret = written.split('.').nth(1).expect("a secret");
    assert!(secret.len() == 64 && !log.contains(secret) && !cluster.log().contains(secret));
    let kept = fs::read_to_string(pki.join("tokens")).expect("read");
    assert!(!kept.contains(secret), "{kept}");
}
