package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/confmap"
	"github.com/knadh/koanf/providers/file"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dualcheck/dualcheck/internal/rediscache"
	"github.com/dualcheck/dualcheck/internal/telemetry"
)

// envPrefix is what every setting's variable begins with: DUALCHECK_GRPC_ADDR is
// grpc-addr.
const envPrefix = "DUALCHECK_"

// clientVariables are the client commands' own and no settings of a server.
var clientVariables = []string{addrVariable}

// settings are what a server is run with. The names are those of the flags, of the
// file's keys and, in capitals, of the environment's variables.
type settings struct {
	GRPCAddr      string `koanf:"grpc-addr"`
	HTTPAddr      string `koanf:"http-addr"`
	DebugAddr     string `koanf:"debug-addr"`
	AdvertiseAddr string `koanf:"advertise-addr"`
	NodeID        string `koanf:"node-id"`

	EtcdEndpoints    []string `koanf:"etcd-endpoints"`
	EtcdUser         string   `koanf:"etcd-user"`
	EtcdPassword     string   `koanf:"etcd-password"`
	EtcdPasswordFile string   `koanf:"etcd-password-file"`
	EtcdCAFile       string   `koanf:"etcd-ca-file"`
	EtcdCertFile     string   `koanf:"etcd-cert-file"`
	EtcdKeyFile      string   `koanf:"etcd-key-file"`
	EtcdServerName   string   `koanf:"etcd-server-name"`

	RedisMode                 string   `koanf:"redis-mode"`
	RedisAddrs                []string `koanf:"redis-addrs"`
	RedisMasterName           string   `koanf:"redis-master-name"`
	RedisUser                 string   `koanf:"redis-user"`
	RedisPassword             string   `koanf:"redis-password"`
	RedisPasswordFile         string   `koanf:"redis-password-file"`
	RedisSentinelUser         string   `koanf:"redis-sentinel-user"`
	RedisSentinelPassword     string   `koanf:"redis-sentinel-password"`
	RedisSentinelPasswordFile string   `koanf:"redis-sentinel-password-file"`
	RedisTLS                  bool     `koanf:"redis-tls"`
	RedisCAFile               string   `koanf:"redis-ca-file"`
	RedisCertFile             string   `koanf:"redis-cert-file"`
	RedisKeyFile              string   `koanf:"redis-key-file"`
	RedisServerName           string   `koanf:"redis-server-name"`
	RedisPoolSize             int      `koanf:"redis-pool-size"`

	MemoryBytes int64 `koanf:"memory-bytes"`

	TLSCertFile string `koanf:"tls-cert-file"`
	TLSKeyFile  string `koanf:"tls-key-file"`

	LogFormat string `koanf:"log-format"`
	LogLevel  string `koanf:"log-level"`
	LogKeys   bool   `koanf:"log-keys"`

	RequireDeclared  bool          `koanf:"require-declared-namespaces"`
	Reflection       bool          `koanf:"reflection"`
	MaxInFlight      int           `koanf:"max-in-flight"`
	MaxConnectionAge time.Duration `koanf:"max-connection-age"`
	PreDrainDelay    time.Duration `koanf:"pre-drain-delay"`
	DrainTimeout     time.Duration `koanf:"drain-timeout"`
}

// defaultSettings are what a server is run with if nothing is said.
func defaultSettings() settings {
	return settings{
		GRPCAddr:         ":7070",
		HTTPAddr:         ":7071",
		RedisMode:        string(rediscache.Standalone),
		RedisAddrs:       []string{},
		MemoryBytes:      64 << 20,
		LogFormat:        string(telemetry.LogText),
		LogLevel:         "info",
		Reflection:       true,
		MaxInFlight:      10_000,
		MaxConnectionAge: 30 * time.Minute,
		DrainTimeout:     45 * time.Second,
	}
}

// secretSettings cannot be flags, because everyone on a machine sees those, and are
// never printed.
var secretSettings = []string{"etcd-password", "redis-password", "redis-sentinel-password"}

// settingsFlags gives a command a flag for every setting.
func settingsFlags(cmd *cobra.Command) {
	d, f := defaultSettings(), cmd.Flags()
	f.String("config", "", "read settings from this YAML file; the environment and flags go before it")
	fileFlag(cmd, "config")
	f.String("grpc-addr", d.GRPCAddr, "where gRPC listens; port 0 takes a free one")
	f.String("http-addr", d.HTTPAddr, "where JSON, health and metrics listen")
	f.String("debug-addr", d.DebugAddr, "where pprof listens; empty: nowhere")
	f.String("advertise-addr", d.AdvertiseAddr, "the gRPC address to tell others (default: the host's name and the gRPC port)")
	f.String("node-id", d.NodeID, "this node's name, unique among the living (default: the host's name and a random end)")
	f.StringSlice("etcd-endpoints", d.EtcdEndpoints, "etcd's client addresses, host:port or URLs, separated by commas")
	f.String("etcd-user", d.EtcdUser, "user name in etcd")
	f.String("etcd-password-file", d.EtcdPasswordFile, "file with that user's password (or "+envPrefix+"ETCD_PASSWORD)")
	f.String("etcd-ca-file", d.EtcdCAFile, "trust the authorities in this PEM file alone for etcd; implies TLS")
	f.String("etcd-cert-file", d.EtcdCertFile, "show etcd this certificate (PEM)")
	f.String("etcd-key-file", d.EtcdKeyFile, "that certificate's key (PEM)")
	f.String("etcd-server-name", d.EtcdServerName, "the name that etcd's certificate must have (default: the endpoint's host)")
	f.String("redis-mode", d.RedisMode, "how Redis is run: standalone, sentinel or cluster")
	f.StringSlice("redis-addrs", d.RedisAddrs, "Redis's address, the sentinels', or some of the cluster's; host:port, separated by commas; none: etcd answers what memory does not")
	f.String("redis-master-name", d.RedisMasterName, "what the sentinels call the master")
	f.String("redis-user", d.RedisUser, "user name in Redis (ACL)")
	f.String("redis-password-file", d.RedisPasswordFile, "file with that user's password (or "+envPrefix+"REDIS_PASSWORD)")
	f.String("redis-sentinel-user", d.RedisSentinelUser, "user name at the sentinels")
	f.String("redis-sentinel-password-file", d.RedisSentinelPasswordFile, "file with that user's password (or "+envPrefix+"REDIS_SENTINEL_PASSWORD)")
	f.Bool("redis-tls", d.RedisTLS, "reach Redis, and the sentinels, over TLS")
	f.String("redis-ca-file", d.RedisCAFile, "trust the authorities in this PEM file alone for Redis; implies TLS")
	f.String("redis-cert-file", d.RedisCertFile, "show Redis this certificate (PEM)")
	f.String("redis-key-file", d.RedisKeyFile, "that certificate's key (PEM)")
	f.String("redis-server-name", d.RedisServerName, "the name that Redis's certificate must have (default: the address's host)")
	f.Int("redis-pool-size", d.RedisPoolSize, "connections to each Redis server at most; 0: as many as can be of use")
	completeWith(cmd, "redis-mode", redisModes...)
	f.Int64("memory-bytes", d.MemoryBytes, "how many bytes of this node's memory finished records may take, about; 0: none is kept")
	f.String("tls-cert-file", d.TLSCertFile, "serve both ports with this certificate (PEM); read again when it changes")
	f.String("tls-key-file", d.TLSKeyFile, "that certificate's key (PEM)")
	logFlags(cmd, &d)
	f.Bool("require-declared-namespaces", d.RequireDeclared, "refuse namespaces that nobody declared, instead of giving them the default policy")
	f.Bool("reflection", d.Reflection, "let gRPC clients learn the contract from the server")
	f.Int("max-in-flight", d.MaxInFlight, "how many questions etcd is asked at once; those over it are OVERLOADED, finishes and extensions never")
	f.Duration("max-connection-age", d.MaxConnectionAge, "have gRPC clients connect anew this often, so that load spreads; 0: never")
	f.Duration("pre-drain-delay", d.PreDrainDelay, "go on serving for so long after health says no, while load balancers notice")
	f.Duration("drain-timeout", d.DrainTimeout, "cut off what has not ended so long after a stop was asked for")
	for _, name := range []string{"etcd-password-file", "etcd-ca-file", "etcd-cert-file", "etcd-key-file", "redis-password-file", "redis-sentinel-password-file", "redis-ca-file", "redis-cert-file", "redis-key-file", "tls-cert-file", "tls-key-file"} {
		fileFlag(cmd, name)
	}
}

// logFlags are those that dev has too.
func logFlags(cmd *cobra.Command, s *settings) {
	f := cmd.Flags()
	f.StringVar(&s.LogFormat, "log-format", s.LogFormat, "text or json")
	f.StringVar(&s.LogLevel, "log-level", s.LogLevel, "debug, info, warn or error")
	f.BoolVar(&s.LogKeys, "log-keys", s.LogKeys, "log keys as they are, not a part of their hash")
	completeWith(cmd, "log-format", "text", "json")
	completeWith(cmd, "log-level", "debug", "info", "warn", "error")
}

// settingNames lists every setting.
func settingNames() []string {
	var names []string
	for f := range reflect.TypeFor[settings]().Fields() {
		names = append(names, f.Tag.Get("koanf"))
	}
	return names
}

// loaded are settings, where each came from, and what is wrong with them.
type loaded struct {
	settings
	from     map[string]string
	unread   map[string]bool // settings whose values could not be taken
	mistakes []error
}

// loadSettings reads the settings, and says of those that cannot be used all that is
// wrong with them.
func loadSettings(flags *pflag.FlagSet, environ []string) (*loaded, error) {
	l, err := readSettings(flags, environ)
	if err != nil {
		return nil, err
	}
	l.check()
	return l, l.err()
}

// readSettings reads flags over the environment over the file over the defaults.
// What is not known is a mistake, so that no misspelt setting is silently without
// effect; mistakes are sentences that say which setting and where.
func readSettings(flags *pflag.FlagSet, environ []string) (*loaded, error) {
	l := &loaded{settings: defaultSettings(), from: map[string]string{}, unread: map[string]bool{}}
	path, err := configPath(flags, environ)
	if err != nil {
		return nil, err
	}
	if path != "" {
		k := koanf.New("\x00") // no setting's name is a path
		if err := k.Load(file.Provider(path), yaml.Parser()); err != nil {
			return nil, usageErrorf("read the configuration %s: %s", path, oneLine(err.Error()))
		}
		l.take(k.Raw(), path, func(name string) string { return name })
	}
	env := map[string]any{}
	for _, entry := range environ {
		variable, value, _ := strings.Cut(entry, "=")
		name, ours := strings.CutPrefix(variable, envPrefix)
		if !ours || variable == configVariable || slices.Contains(clientVariables, variable) {
			continue
		}
		env[strings.ReplaceAll(strings.ToLower(name), "_", "-")] = value
	}
	l.take(env, "the environment", variableOf)
	given := map[string]any{}
	flags.Visit(func(f *pflag.Flag) {
		if slices.Contains(settingNames(), f.Name) {
			given[f.Name] = f.Value.String()
			if s, ok := f.Value.(pflag.SliceValue); ok {
				given[f.Name] = s.GetSlice()
			}
		}
	})
	l.take(given, "the flags", func(name string) string { return "--" + name })
	return l, nil
}

// mistake notes what is wrong with these settings, and where they came from.
func (l *loaded) mistake(names []string, format string, args ...any) {
	if slices.ContainsFunc(names, func(name string) bool { return l.unread[name] }) {
		return // its value was never taken, and that is a mistake already
	}
	l.mistakes = append(l.mistakes, fmt.Errorf("%s (%s)", oneLine(fmt.Sprintf(format, args...)), l.origins(names)))
}

// origin is where a setting came from.
func (l *loaded) origin(name string) string {
	if from := l.from[name]; from != "" {
		return from
	}
	return "default"
}

// origins tells where settings came from: in a word, if that is one place.
func (l *loaded) origins(names []string) string {
	one, each := "default", []string(nil)
	if len(names) > 0 {
		one = l.origin(names[0])
	}
	for _, name := range names {
		if l.origin(name) != one {
			one = ""
		}
		each = append(each, name+": "+l.origin(name))
	}
	if one != "" {
		return one
	}
	return strings.Join(each, ", ")
}

// err is nil, or all mistakes, one a line.
func (l *loaded) err() error {
	switch len(l.mistakes) {
	case 0:
		return nil
	case 1:
		return usageErrorf("the settings cannot be used: %w", l.mistakes[0])
	}
	return usageErrorf("the settings cannot be used:\n%w", errors.Join(l.mistakes...))
}

// lineByLine says an error of several lines, which would be put into one otherwise.
func lineByLine(cmd *cobra.Command, err error) error {
	if err == nil || !isUsage(err) || !strings.Contains(err.Error(), "\n") {
		return err
	}
	first, rest, _ := strings.Cut(err.Error(), "\n")
	fmt.Fprintln(cmd.ErrOrStderr(), "dualcheck: "+first)
	for line := range strings.SplitSeq(rest, "\n") {
		fmt.Fprintln(cmd.ErrOrStderr(), "  "+printable(line))
	}
	return &exitError{code: exitUsage}
}

const configVariable = envPrefix + "CONFIG"

// configPath is where the file is: a flag or the environment says so, or there is
// none.
func configPath(flags *pflag.FlagSet, environ []string) (string, error) {
	if f := flags.Lookup("config"); f != nil && f.Changed {
		if f.Value.String() == "" {
			return "", usageErrorf("--config names no file")
		}
		return f.Value.String(), nil
	}
	for _, entry := range environ {
		if path, ok := strings.CutPrefix(entry, configVariable+"="); ok {
			return path, nil
		}
	}
	return "", nil
}

func variableOf(name string) string {
	return envPrefix + strings.ToUpper(strings.ReplaceAll(name, "-", "_"))
}

// take puts what one source says over what is there. spell is how that source
// spells a setting's name.
func (l *loaded) take(values map[string]any, source string, spell func(string) string) {
	bad := func(name, what string) {
		l.unread[name] = true
		l.mistakes = append(l.mistakes, fmt.Errorf("%s: %s", source, oneLine(what)))
	}
	names := settingNames()
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if !slices.Contains(names, name) {
			hint := ""
			if near := nearest(name, names); near != "" {
				hint = ": did you mean " + spell(near) + "?"
			}
			bad(name, "there is no setting "+spell(name)+hint)
			continue
		}
		k := koanf.New("\x00")
		if err := k.Load(confmap.Provider(map[string]any{name: values[name]}, ""), nil); err != nil {
			bad(name, spell(name)+": "+err.Error())
			continue
		}
		err := k.UnmarshalWithConf("", &l.settings, koanf.UnmarshalConf{DecoderConfig: &mapstructure.DecoderConfig{
			TagName: "koanf", ErrorUnused: true, WeaklyTypedInput: true,
			DecodeHook: mapstructure.ComposeDecodeHookFunc(plainValue, mapstructure.StringToTimeDurationHookFunc(), mapstructure.StringToSliceHookFunc(",")),
		}})
		if err != nil {
			bad(name, spell(name)+": "+meaning(err))
			continue
		}
		delete(l.unread, name)
		l.from[name] = source
	}
}

// plainValue refuses what would only be taken by guessing.
func plainValue(from, to reflect.Type, value any) (any, error) {
	switch {
	case to == reflect.TypeFor[time.Duration]() && from.Kind() != reflect.String && from != to:
		return nil, errors.New("a duration needs a unit, for instance 30s")
	case to.Kind() == reflect.String && from.Kind() != reflect.String:
		return nil, errors.New("it must be text")
	case to.Kind() == reflect.Bool && from.Kind() != reflect.Bool && from.Kind() != reflect.String:
		return nil, errors.New("it must be true or false")
	case to.Kind() == reflect.Bool && value == "":
		return nil, errors.New("it must be true or false")
	}
	return value, nil
}

// meaning is the sentence in an error of the decoder.
func meaning(err error) string {
	text := err.Error()
	if bad, ok := errors.AsType[*mapstructure.DecodeError](err); ok {
		text = bad.Unwrap().Error()
	}
	return oneLine(text)
}

// nearest is the name that was probably meant; "" if none is near.
func nearest(name string, names []string) string {
	best, least := "", len(name)/3+2
	for _, n := range names {
		if d := distance(name, n); d < least {
			best, least = n, d
		}
	}
	return best
}

// distance is how many letters apart two words are (Levenshtein).
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := 1
			if a[i] == b[j] {
				cost = 0
			}
			before, row[j+1] = row[j+1], min(row[j+1]+1, row[j]+1, before+cost)
		}
	}
	return row[len(b)]
}

// password is etcd's, from where the settings say.
func (s settings) password() (string, error) {
	return passwordOf(s.EtcdPassword, "etcd-password-file", s.EtcdPasswordFile)
}

// passwordOf is a password as it was given, or as it is in a file, whose setting is
// named.
func passwordOf(given, name, path string) (string, error) {
	if path == "" {
		return given, nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("%s: %w", name, err)
	}
	password := strings.TrimRight(string(b), "\r\n")
	if password == "" {
		return "", fmt.Errorf("%s: %s is empty", name, path)
	}
	return password, nil
}

func newConfigCommand() *cobra.Command {
	show := &cobra.Command{
		Use:   "print",
		Short: "Print the settings that serve would run with, and where each comes from",
		Args:  arguments(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			l, err := loadSettings(cmd.Flags(), os.Environ())
			if err != nil {
				return lineByLine(cmd, err)
			}
			return l.print(cmd.OutOrStdout())
		},
	}
	settingsFlags(show)
	check := &cobra.Command{
		Use:   "check",
		Short: "Say whether serve could run with these settings",
		Args:  arguments(),
		RunE:  func(cmd *cobra.Command, _ []string) error { return checkConfig(cmd) },
	}
	settingsFlags(check)
	return commandGroup(&cobra.Command{Use: "config", Short: "Look at the settings of serve"}, show, check)
}

// checkConfig reads the settings and the files they name, and talks to nobody.
func checkConfig(cmd *cobra.Command) error {
	l, err := readSettings(cmd.Flags(), os.Environ())
	if err != nil {
		return err
	}
	l.check()
	l.checkFiles()
	if err := l.err(); err != nil {
		return lineByLine(cmd, err)
	}
	fmt.Fprintln(cmd.OutOrStdout(), "the settings are in order")
	return nil
}

// print writes the settings as a file that could be given to --config.
func (l *loaded) print(w io.Writer) error {
	v := reflect.ValueOf(l.settings)
	for i, f := range slices.Collect(reflect.TypeFor[settings]().Fields()) {
		name := f.Tag.Get("koanf")
		value := v.Field(i).Interface()
		if d, ok := value.(time.Duration); ok {
			value = d.String()
		}
		prefix := ""
		if slices.Contains(secretSettings, name) {
			prefix = "# "
			if value != "" {
				value = "(set)"
			}
		}
		line, err := yaml.Parser().Marshal(map[string]any{name: value})
		if err != nil {
			return fmt.Errorf("write setting %s: %w", name, err)
		}
		text := strings.TrimRight(string(line), "\n")
		first, rest, more := strings.Cut(text, "\n")
		if more {
			rest = "\n" + rest
		}
		if _, err := fmt.Fprintf(w, "%s%s # %s%s\n", prefix, first, l.origin(name), rest); err != nil {
			return err
		}
	}
	return nil
}
