package ingest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// journalFormat is the layout of a journal, told in its first line.
const journalFormat = 1

// Journal is a file that says which commands may have begun and are not known
// to have ended. It is only appended to, one JSON object a line: "started" is on
// disk before its command begins; "ended" follows when the command's outcome has
// been taken by the service, its claim is gone, or nothing was begun. Of each name the last line
// counts. It holds claims' tokens, so only its owner may read it. One process has
// it at a time.
type Journal struct {
	path string

	mu   sync.Mutex
	file journalFile
	open map[name]entry
	// good is where the last whole line ends. broken is why nothing may be
	// appended any more: something else is behind it.
	good   int64
	broken error
}

// journalFile is what a Journal uses of an *os.File.
type journalFile interface {
	io.ReadWriteSeeker
	io.Closer
	Truncate(size int64) error
	Sync() error
}

// entry is one line of a journal.
type entry struct {
	// Format is set in the first line alone.
	Format int `json:"format,omitempty"`
	// Event is "started" or "ended".
	Event     string `json:"event,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	Key       string `json:"key,omitempty"`

	Line        int       `json:"line,omitempty"`
	Operation   string    `json:"operation,omitempty"`
	Fingerprint []byte    `json:"fingerprint,omitempty"`
	Token       string    `json:"token,omitempty"`
	Attempt     int32     `json:"attempt,omitempty"`
	Fence       int64     `json:"fence,omitempty"`
	At          time.Time `json:"at,omitzero"`
}

// ErrJournalInUse: another process has the journal.
var ErrJournalInUse = errors.New("another run has the journal")

// OpenJournal opens the journal at path, or makes it. A last line that was not
// written whole is dropped: its command had not begun. Errors: ErrJournalInUse;
// a journal that is damaged or of another format; the file system's.
func OpenJournal(path string) (*Journal, error) {
	for {
		file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return nil, fmt.Errorf("open the journal: %w", err)
		}
		if err := lockFile(file); err != nil {
			return nil, errors.Join(fmt.Errorf("journal %s: %w", path, err), file.Close())
		}
		if same, err := isAt(file, path); err != nil || !same {
			// A run that ended removed it between our open and our lock.
			if err := errors.Join(err, file.Close()); err != nil {
				return nil, fmt.Errorf("open the journal: %w", err)
			}
			continue
		}
		j := &Journal{path: path, file: file, open: map[name]entry{}}
		if err := j.load(); err != nil {
			return nil, errors.Join(fmt.Errorf("journal %s: %w", path, err), file.Close())
		}
		return j, nil
	}
}

// isAt says whether file is still what path names.
func isAt(file *os.File, path string) (bool, error) {
	ours, err := file.Stat()
	if err != nil {
		return false, err
	}
	there, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	return err == nil && os.SameFile(ours, there), err
}

// load reads the file and leaves it ready to be appended to.
func (j *Journal) load() error {
	in := bufio.NewReader(j.file)
	var whole int64
	for number := 1; ; number++ {
		raw, err := in.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		var e entry
		if err := json.Unmarshal(raw, &e); err != nil {
			return fmt.Errorf("line %d is damaged: %w", number, err)
		}
		if number == 1 && e.Format != journalFormat {
			return fmt.Errorf("format %d is not known, this version writes format %d", e.Format, journalFormat)
		}
		switch n := (name{e.Namespace, e.Key}); e.Event {
		case "started":
			j.open[n] = e
		case "ended":
			delete(j.open, n)
		}
		whole += int64(len(raw))
	}
	j.good = whole
	if err := j.backToGood(); err != nil {
		return err
	}
	if whole > 0 {
		return nil
	}
	if err := j.append(entry{Format: journalFormat}); err != nil {
		return err
	}
	if err := j.file.Sync(); err != nil {
		return err
	}
	return syncDir(filepath.Dir(j.path))
}

// syncDir makes a new file's name durable.
func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// append writes a line: all of it or, if it fails, nothing. When what was
// written of it cannot be taken back the journal is broken, as the next line
// would be part of this one.
func (j *Journal) append(e entry) error {
	if j.broken != nil {
		return j.broken
	}
	raw, err := json.Marshal(e)
	if err != nil {
		return err
	}
	n, err := j.file.Write(append(raw, '\n'))
	if err == nil {
		j.good += int64(n)
		return nil
	}
	if back := j.backToGood(); back != nil {
		j.broken = fmt.Errorf("its last line was not written whole (%w) and could not be taken back: %w", err, back)
		return j.broken
	}
	return err
}

// backToGood drops what is behind the last whole line; the next goes there.
func (j *Journal) backToGood() error {
	if err := j.file.Truncate(j.good); err != nil {
		return err
	}
	_, err := j.file.Seek(j.good, io.SeekStart)
	return err
}

// start records that a line's command is about to begin. When it returns nil,
// that is on disk.
func (j *Journal) start(t task, h *held) error {
	e := entry{
		Event:       "started",
		Namespace:   t.name.namespace,
		Key:         t.name.key,
		Line:        t.number,
		Operation:   t.operation,
		Fingerprint: t.fingerprint[:],
		Token:       h.token,
		Attempt:     h.attempt,
		Fence:       h.fence,
		At:          time.Now().UTC(),
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if err := j.append(e); err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	if err := j.file.Sync(); err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	j.open[t.name] = e
	return nil
}

// end records that nothing of a name is under way. It need not reach the disk:
// without it, the next run asks the service what became of the name.
func (j *Journal) end(n name) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if _, open := j.open[n]; !open {
		return nil
	}
	if err := j.append(entry{Event: "ended", Namespace: n.namespace, Key: n.key}); err != nil {
		return fmt.Errorf("write the journal: %w", err)
	}
	delete(j.open, n)
	return nil
}

// find is what the journal has open for a name.
func (j *Journal) find(n name) (entry, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	e, open := j.open[n]
	return e, open
}

// entries is everything that is open, by line.
func (j *Journal) entries() []entry {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.SortedFunc(maps.Values(j.open), func(a, b entry) int {
		if a.Line != b.Line {
			return a.Line - b.Line
		}
		return strings.Compare(a.Key, b.Key)
	})
}

// Close closes the journal, and removes it if it has nothing open.
func (j *Journal) Close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	var err error
	if len(j.open) == 0 {
		err = os.Remove(j.path)
	}
	return errors.Join(err, j.file.Close())
}

// HasDoubts says whether the journal at path has anything open. No file has
// nothing.
func HasDoubts(path string) (bool, error) {
	if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	j, err := OpenJournal(path)
	if err != nil {
		return false, err
	}
	open := len(j.open) > 0
	return open, j.Close()
}
