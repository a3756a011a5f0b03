//go:build unix && !solaris && !aix

package ingest

import (
	"errors"
	"os"
	"syscall"
)

// lockFile takes the file for this process until it is closed.
func lockFile(file *os.File) error {
	err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return ErrJournalInUse
	}
	return err
}
