//! The file of applications.

use crate::governor::Settings;
use crate::share::Bounds;
use crate::sink::{Address, Cgroup, Ending, Hook, Jvm, Memcached, Redis, Sink};
use hecaton_memory::Size;
use serde::de::{Deserialize, Deserializer, Error as _};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

/// Settings of the manager, and its applications.
#[derive(Debug)]
pub struct Config {
    pub(crate) settings: Settings,
    /// The most that is readied for the host ahead of its asking, in bytes; 0 for nothing.
    pub(crate) pre_reclaim_bytes: u64,
    /// In the order in which they give back.
    pub(crate) applications: Vec<Application>,
}

/// One application.
#[derive(Debug)]
pub(crate) struct Application {
    pub(crate) bounds: Bounds,
    pub(crate) adapter: Adapter,
}

/// How it is told.
#[derive(Debug)]
pub(crate) enum Adapter {
    Redis(RedisTable),
    Memcached(MemcachedTable),
    Cgroup(PathBuf),
    Jvm(JvmTable),
    Hook(HookTable),
    /// It asks itself.
    Api,
}

/// Why there is no such configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// No such file, or not to be read.
    #[error("{path} cannot be read")]
    Read {
        /// The file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// It is not the format.
    #[error("{path}: {reason}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Where, and what.
        reason: String,
    },
    /// Nobody to tell.
    #[error("{0} lists no application; add one: [[application]] with a name and how it is told")]
    Nobody(PathBuf),
    /// Two of a name.
    #[error("there are two applications `{0}`; give each a name of its own")]
    Twice(String),
    /// A name that cannot stand in a path of the API.
    #[error(
        "`{0}` cannot be an application's name: take 1 to 64 letters, digits, `-`, `_` and `.`"
    )]
    Name(String),
    /// No adapter, or several.
    #[error(
        "application {name}: it is told in {count} ways; give one of redis, memcached, cgroup, jvm, hook and \
         api"
    )]
    Ways {
        /// The application.
        name: String,
        /// How many were given.
        count: usize,
    },
    /// The minimum is above the maximum.
    #[error("application {name}: min {} is more than max {}; exchange them", Size(*.min), Size(*.max))]
    MinAboveMax {
        /// The application.
        name: String,
        /// The given minimum, in bytes.
        min: u64,
        /// The given maximum, in bytes.
        max: u64,
    },
    /// Those before it would never have more than their minimum.
    #[error(
        "application {name} has no max, so that those listed before it would never have more than their min: \
         give it one, or list it first"
    )]
    NoMax {
        /// The application.
        name: String,
    },
    /// A hook without a program.
    #[error("application {name}: the hook's command is empty; name a program")]
    NoProgram {
        /// The application.
        name: String,
    },
    /// A time that is none.
    #[error("{what} = 0 leaves no time at all; give a second or more")]
    NoTime {
        /// Which.
        what: String,
    },
}

/// The whole file.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct FileTable {
    #[serde(deserialize_with = "size")]
    reserve: u64,
    #[serde(default, deserialize_with = "some_size")]
    free: Option<u64>,
    #[serde(default = "default_patience_s")]
    patience_s: u64,
    #[serde(default, deserialize_with = "size")]
    pre_reclaim: u64,
    #[serde(default, rename = "application")]
    applications: Vec<ApplicationTable>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct ApplicationTable {
    name: String,
    #[serde(default, deserialize_with = "size")]
    min: u64,
    #[serde(default, deserialize_with = "some_size")]
    max: Option<u64>,
    redis: Option<RedisTable>,
    memcached: Option<MemcachedTable>,
    cgroup: Option<PathBuf>,
    jvm: Option<JvmTable>,
    hook: Option<HookTable>,
    api: Option<ApiTable>,
}

#[derive(Clone, Debug, serde::Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct RedisTable {
    #[serde(deserialize_with = "address")]
    address: Address,
    user: Option<String>,
    password_file: Option<PathBuf>,
}

#[derive(Clone, Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MemcachedTable {
    #[serde(deserialize_with = "address")]
    address: Address,
}

#[derive(Clone, Debug, serde::Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct JvmTable {
    pid_file: PathBuf,
    #[serde(default = "default_jcmd")]
    jcmd: PathBuf,
}

#[derive(Clone, Debug, serde::Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct HookTable {
    command: Vec<String>,
    #[serde(default = "default_timeout_s")]
    timeout_s: u64,
}

#[derive(Clone, Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct ApiTable {}

const fn default_patience_s() -> u64 {
    5
}

const fn default_timeout_s() -> u64 {
    10
}

fn default_jcmd() -> PathBuf {
    "jcmd".into()
}

fn size<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let text = String::deserialize(from)?;
    text.parse().map(|Size(bytes)| bytes).map_err(D::Error::custom)
}

fn some_size<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    size(from).map(Some)
}

fn address<'de, D: Deserializer<'de>>(from: D) -> Result<Address, D::Error> {
    String::deserialize(from)?.parse().map_err(D::Error::custom)
}

impl Config {
    /// Reads and checks a file.
    pub fn read(path: &Path) -> Result<Config, ConfigError> {
        let text = fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Config::parse(&text, path)
    }

    /// Checks a file's text; `path` is what errors call it.
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        let file: FileTable = toml::from_str(text).map_err(|error| {
            let line = error.span().map(|span| 1 + text[..span.start].matches('\n').count());
            let reason = error.message().lines().collect::<Vec<_>>().join(" ");
            ConfigError::Syntax {
                path: path.to_owned(),
                reason: line.map_or(reason.clone(), |line| format!("line {line}: {reason}")),
            }
        })?;
        if file.applications.is_empty() {
            return Err(ConfigError::Nobody(path.to_owned()));
        }
        if file.patience_s == 0 {
            return Err(ConfigError::NoTime { what: "patience-s".to_owned() });
        }
        let settings = Settings {
            reserve_bytes: file.reserve,
            free_bytes: file.free.unwrap_or(file.reserve / 4),
            patience: Duration::from_secs(file.patience_s),
        };
        let mut names = BTreeSet::new();
        let mut applications = Vec::new();
        for (at, table) in file.applications.into_iter().enumerate() {
            if !names.insert(table.name.clone()) {
                return Err(ConfigError::Twice(table.name));
            }
            applications.push(table.check(at == 0)?);
        }
        Ok(Config { settings, pre_reclaim_bytes: file.pre_reclaim, applications })
    }
}

impl ApplicationTable {
    fn check(self, is_first: bool) -> Result<Application, ConfigError> {
        let name = self.name;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if name.is_empty() || name.len() > 64 || !name.chars().all(is_plain) {
            return Err(ConfigError::Name(name));
        }
        if self.max.is_none() && !is_first {
            return Err(ConfigError::NoMax { name });
        }
        let max_bytes = self.max.unwrap_or(u64::MAX);
        if self.min > max_bytes {
            return Err(ConfigError::MinAboveMax { name, min: self.min, max: max_bytes });
        }
        let ways = [
            self.redis.map(Adapter::Redis),
            self.memcached.map(Adapter::Memcached),
            self.cgroup.map(Adapter::Cgroup),
            self.jvm.map(Adapter::Jvm),
            self.hook.map(Adapter::Hook),
            self.api.map(|ApiTable {}| Adapter::Api),
        ];
        let mut ways: Vec<Adapter> = ways.into_iter().flatten().collect();
        let count = ways.len();
        let Some(adapter) = ways.pop().filter(|_| count == 1) else {
            return Err(ConfigError::Ways { name, count });
        };
        if let Adapter::Hook(hook) = &adapter {
            if hook.command.is_empty() {
                return Err(ConfigError::NoProgram { name });
            }
            if hook.timeout_s == 0 {
                let what = format!("application {name}: timeout-s");
                return Err(ConfigError::NoTime { what });
            }
        }
        let hears_of_evictions = matches!(adapter, Adapter::Hook(_) | Adapter::Api);
        let bounds = Bounds { name, min_bytes: self.min, max_bytes, hears_of_evictions };
        Ok(Application { bounds, adapter })
    }
}

impl Application {
    /// Creates the adapter that tells the application; `None` if the application asks through the
    /// API.
    pub(crate) fn sink(&self, ending: &Ending) -> Option<Box<dyn Sink>> {
        Some(match &self.adapter {
            Adapter::Redis(table) => Box::new(Redis {
                address: table.address.clone(),
                user: table.user.clone(),
                password_file: table.password_file.clone(),
            }),
            Adapter::Memcached(table) => Box::new(Memcached { address: table.address.clone() }),
            Adapter::Cgroup(dir) => Box::new(Cgroup { dir: dir.clone() }),
            Adapter::Jvm(table) => Box::new(Jvm {
                pid_file: table.pid_file.clone(),
                jcmd: table.jcmd.clone(),
                ending: ending.clone(),
                told: None,
            }),
            Adapter::Hook(table) => Box::new(Hook {
                application: self.bounds.name.clone(),
                command: table.command.clone(),
                timeout: Duration::from_secs(table.timeout_s),
                ending: ending.clone(),
            }),
            Adapter::Api => return None,
        })
    }

    /// Its adapter's name.
    pub(crate) fn kind(&self) -> &'static str {
        match &self.adapter {
            Adapter::Redis(_) => "redis",
            Adapter::Memcached(_) => "memcached",
            Adapter::Cgroup(_) => "cgroup",
            Adapter::Jvm(_) => "jvm",
            Adapter::Hook(_) => "hook",
            Adapter::Api => "api",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("guest.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn the_file_of_the_documentation_is_taken() {
        let docs = include_str!("../../../../docs/harvesting.md");
        let begin = docs.find("```toml\n").expect("there is one") + "```toml\n".len();
        let text = &docs[begin..begin + docs[begin..].find("```").expect("it ends")];
        let config = parse(text).expect("taken");
        let kinds: Vec<_> = config.applications.iter().map(Application::kind).collect();
        assert_eq!(kinds, ["cgroup", "jvm", "memcached", "redis", "hook", "api"]);
        let bounds = &config.applications[3].bounds;
        assert_eq!((bounds.min_bytes, bounds.max_bytes), (1 << 30, 8 << 30));
        let hear: Vec<_> =
            config.applications.iter().map(|one| one.bounds.hears_of_evictions).collect();
        assert_eq!(hear, [false, false, false, false, true, true]);
    }

    #[test]
    fn what_is_left_out_has_a_default() {
        let config = parse("reserve = '2G'\n[[application]]\nname = 'a'\napi = {}\n").unwrap();
        let expected = Settings {
            reserve_bytes: 2 << 30,
            free_bytes: 512 << 20,
            patience: Duration::from_secs(5),
        };
        assert_eq!(config.settings, expected);
        assert_eq!(config.pre_reclaim_bytes, 0);
        let bounds = &config.applications[0].bounds;
        assert_eq!((bounds.min_bytes, bounds.max_bytes), (0, u64::MAX));
    }

    #[test]
    fn errors_name_what_was_wrong_and_the_way_out() {
        let with = |lines: &str| format!("reserve = '1G'\n[[application]]\nname = 'a'\n{lines}\n");
        let twice = with("api = {}\n[[application]]\nname = 'a'\napi = {}");
        let no_max = with("api = {}\n[[application]]\nname = 'b'\napi = {}");
        for (text, words) in [
            ("", ["guest.toml", "reserve"]),
            ("reserve = '1G'", ["guest.toml lists no application", "[[application]]"]),
            ("reserve = 'much'", ["`much` is not a size", "512M"]),
            (
                "reserve = '1G'\npatience-s = 0\n[[application]]\nname = 'a'",
                ["patience-s = 0", "or more"],
            ),
            (&with(""), ["told in 0 ways", "give one of"]),
            (&with("api = {}\ncgroup = '/x'"), ["told in 2 ways", "give one of"]),
            (&with("api = {}\nmin = '2G'\nmax = '1G'"), ["min 2G is more than max 1G", "exchange"]),
            (&with("redis = { address = '/run/x' }"), ["`/run/x` is no address", "unix:/PATH"]),
            (&with("redis = { adress = 'a:1' }"), ["line 4", "adress"]),
            (&with("hook = { command = [] }"), ["command is empty", "name a program"]),
            (&with("hook = { command = ['x'], timeout-s = 0 }"), ["timeout-s = 0", "or more"]),
            (&with("api = {}").replace("'a'", "'a/b'"), ["`a/b` cannot be", "letters"]),
            (&twice, ["two applications `a`", "its own"]),
            (&no_max, ["application b has no max", "list it first"]),
        ] {
            let error = parse(text).expect_err(text);
            assert!(words.iter().all(|word| error.contains(word)), "{words:?}: {error}");
        }
    }
}
